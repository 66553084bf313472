"""The whole server with its worker on CUDA: words, streams, calls, a killed worker, and a card that is free again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking
from tests.gpu.marks import NEEDS_CUDA, torch
from tests.process.test_qwen3 import LONG, TINY, WAVES, killed_in_mid_stream, said
from tests.server import Server, events_of, serving
from tests.speech import silence, wav, word_errors
from worker.cores import cores_near, usable_cores

pytestmark = [*NEEDS_CUDA, pytest.mark.timeout(300)]

LONG_TEXT = " ".join([said(LONG)] * 20)
MIB = 2**20
BUDGET_MIB = 4_096
SLACK_MIB = 300
"""Others may be on the card, and the driver keeps a little for itself."""


def differs(text: str) -> float:
    """Share of words that are not LONG_TEXT's. Not zero: a word here and there depends on the segment around it, and bf16 rounds by
    the company that a row has in its batch."""
    return word_errors(LONG_TEXT, text) / len(LONG_TEXT.split())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(model=TINY, gpu_memory_mb=BUDGET_MIB) as running:
        running.http.timeout = 250
        yield running


def test_every_sample_is_transcribed_exactly(server: Server) -> None:
    assert {path.stem: server.transcribe(path).json()["text"] for path in WAVES} == {
        path.stem: said(path) for path in WAVES
    }


def test_the_worker_is_on_the_card_within_its_budget(server: Server) -> None:
    server.transcribe(LONG)
    worker = server.worker
    assert (worker["engine"], worker["device"]) == ("qwen3", "cuda")
    assert worker["slots"] > 8
    assert 0 < worker["device_bytes"] <= BUDGET_MIB * MIB


def test_a_stream_is_the_text(server: Server) -> None:
    *deltas, done = events_of(server.transcribe(LONG, stream="true", language="en").text)
    assert "".join(event["delta"] for event in deltas) == done["text"] == said(LONG)


async def test_a_call_beside_a_file(server: Server, tmp_path: Path) -> None:
    """Both have their words, and the deltas of an utterance are its final."""
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 20)))
    short = next(path for path in WAVES if path.stem == "flite-awb")
    file = asyncio.create_task(asyncio.to_thread(server.transcribe, path, language="en"))
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        await talk.say(s16(np.concatenate([silence(0.3), read_audio(short), silence(0.9)])))
        await talk.close()
    assert talk.text == said(short)
    assert "".join(event["text"] for event in talk.of("delta")) == talk.text
    assert differs((await file).json()["text"]) < 0.03


def test_a_killed_worker_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 20)))
    done = killed_in_mid_stream(server, path, lambda body: body.count(".delta") >= 12)
    assert differs(done["text"]) < 0.03


async def test_a_call_survives_its_worker(server: Server) -> None:
    from tests.torch.running import read_audio

    short = next(path for path in WAVES if path.stem == "flite-awb")
    sound = s16(np.concatenate([read_audio(short), silence(0.9)]))
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        await talk.say(sound[: len(sound) // 2])
        os.kill(await asyncio.to_thread(server.worker_pid), signal.SIGKILL)
        await talk.say(sound[len(sound) // 2 :])
        await talk.close()
    assert not talk.of("error")
    assert talk.text == said(short)


BREAKER = """
import pathlib, sys, threading, time

def wait_and_break(sign):
    while not sign.exists():
        time.sleep(0.005)
    sign.unlink()
    torch = sys.modules["torch"]
    torch.zeros(1, device="cuda")[torch.tensor([9], device="cuda")]

if "worker" in sys.orig_argv:
    threading.Thread(target=wait_and_break, args=[pathlib.Path({sign!r})], daemon=True).start()
"""
"""Python runs a module of this name at every start. A kernel's assertion fails, and CUDA takes no work of this process any more."""


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever creates this file breaks the card under the worker of a server that is started now."""
    sign = tmp_path / "break"
    (tmp_path / "sitecustomize.py").write_text(BREAKER.format(sign=str(sign)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return sign


async def test_a_card_that_takes_no_work_any_more_costs_no_words(sign: Path, tmp_path: Path) -> None:
    """First under a file that is being streamed, then under a call."""
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 20)))
    short = next(path for path in WAVES if path.stem == "flite-awb")
    sound = s16(np.concatenate([read_audio(short), silence(0.9)]))
    with serving(model=TINY, gpu_memory_mb=BUDGET_MIB) as server:
        server.http.timeout = 250
        server.transcribe(short).raise_for_status()
        done = await asyncio.to_thread(
            killed_in_mid_stream, server, path, lambda body: body.count(".delta") >= 12, lambda _pid: sign.touch()
        )
        assert differs(done["text"]) < 0.03
        assert not sign.exists()
        assert server.worker["generation"] == 2
        async with talking(server, "language=en") as talk:
            await talk.until("ready")
            await talk.say(sound[: len(sound) // 2])
            sign.touch()
            await asyncio.to_thread(server.until, lambda: not sign.exists(), "the card breaks")
            await talk.say(sound[len(sound) // 2 :])
            await talk.close()
        assert not talk.of("error")
        assert talk.text == said(short)
        assert server.worker["generation"] == 3
        assert "device-side assert" in server.log()


def test_an_idle_server_has_nothing_on_the_card() -> None:
    def free_mib() -> int:
        free: int = torch.cuda.mem_get_info()[0] // MIB
        return free

    before = free_mib()
    with serving(model=TINY, gpu_memory_mb=BUDGET_MIB, idle_seconds=2) as server:
        server.http.post(f"/api/ps/{TINY.name}").raise_for_status()
        assert free_mib() < before - SLACK_MIB
        server.until(lambda: server.worker["state"] == "stopped", "the worker leaves")
        assert free_mib() >= before - SLACK_MIB


def test_many_files_are_read_in_processes_beside_the_engine(server: Server, tmp_path: Path) -> None:
    """Which the worker takes with it when it goes."""
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 20)))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _n: server.transcribe(path, language="en"), range(6)))
    assert all(differs(answer.json()["text"]) < 0.03 for answer in answers)
    children = psutil.Process(server.worker_pid()).children()
    assert bool(children) == (usable_cores() >= 4)
    os.kill(server.worker_pid(), signal.SIGKILL)
    _gone, alive = psutil.wait_procs(children, 10)
    assert not alive


def test_a_worker_near_its_card(tmp_path: Path) -> None:
    """Every thread, those of CUDA and the engine included, on the cores that the kernel calls local to the card."""
    card: Any = torch.cuda.get_device_properties(0)
    address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    near = cores_near(address) & os.sched_getaffinity(0)
    with serving(model=TINY, gpu_memory_mb=BUDGET_MIB, cpus="gpu") as server:
        server.transcribe(WAVES[0]).raise_for_status()
        tasks = [int(task.name) for task in Path(f"/proc/{server.worker_pid()}/task").iterdir()]
        assert near
        assert all(os.sched_getaffinity(task) <= near for task in tasks)
