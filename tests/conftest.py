"""For all tests: no NAPSCRIBE_* variable of the developer's, no model hub, and no blocking call on a loop."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.blocking import detector

os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("napscribe", deadline=None)  # a time in a test is a hang guard, never a verdict
settings.load_profile("napscribe")
for name in [name for name in os.environ if name.startswith("NAPSCRIBE_")]:
    del os.environ[name]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    watch = detector()
    watch.activate()
    try:
        yield
    finally:
        watch.deactivate()
