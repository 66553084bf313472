"""Beside a GPU the worker listens in a process of its own; where there is none, it listens itself, to fewer calls."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking
from tests.server import Server, serving
from tests.speech import clip, silence

MODEL = "scripted:hears=clock,device=none:0,live=300"
NO_EARS = """
import sys
if "worker.live.ears_process" in sys.orig_argv:
    sys.exit(3)
"""
"""Python runs a module of this name at every start."""


async def call(server: Server) -> str:
    async with talking(server) as talk:
        await talk.until("ready")
        await talk.say(s16(np.concatenate([silence(0.3), clip("librivox-0880"), silence(0.9)])))
        await talk.close()
    assert not talk.of("error")
    return talk.text


def ears(server: Server) -> list[int]:
    children = psutil.Process(server.worker_pid()).children()
    return [child.pid for child in children if "worker.live.ears_process" in child.cmdline()]


async def test_a_call_is_heard_in_a_process_of_its_own() -> None:
    with serving(model=MODEL) as server:
        text = await call(server)
        assert len(text.split()) > 5
        assert len(ears(server)) == 1
        assert server.worker["max_live"] == 300


async def test_without_that_process_the_worker_listens_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_EARS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with serving(model=MODEL) as server:
        text = await call(server)
        assert len(text.split()) > 5
        assert ears(server) == []
        assert server.worker["max_live"] == 200
        assert "live audio stays in the worker" in server.log()
