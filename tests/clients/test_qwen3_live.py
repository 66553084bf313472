"""A call with Qwen3-ASR through the native socket: deltas as words become certain, their sum the final, words of the file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking, tells_of
from tests.process.test_qwen3 import TINY, WAVES, said
from tests.server import Server, serving
from tests.speech import silence
from worker.decode import read_all

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="needs the `qwen` extra"
    ),
]
