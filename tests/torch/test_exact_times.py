"""Loading the aligner is nobody's step: files wait for it outside, calls do not wait, and whoever waits too long has estimates."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ModelLoadFailed, Unsupported
from shared.messages import Lane
from tests.torch.checkpoints import build_aligner
from tests.torch.running import loaded, read_audio
from tests.torch.test_samples import WAVES
from worker.engines.base import Final, SequenceRequest
from worker.engines.qwen3 import exact_times
from worker.engines.qwen3.aligner import ForcedAligner, aligner_bytes
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import Qwen3Sequence

pytestmark = pytest.mark.torch

SOUND = read_audio(next(wave for wave in WAVES if wave.stem == "flite-awb"))


@pytest.fixture(scope="module")
def aligner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_aligner(tmp_path_factory.mktemp("aligner") / "native")


class Bench:
    """An engine whose aligner is loaded when the test says so."""

    def __init__(self, trained: Path, aligner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_load = threading.Event()
        self.loads = 0
        self.fault: Exception | None = None
        self.woken = threading.Event()

        def load(*arguments: object) -> ForcedAligner:
            self.loads += 1
            assert self.may_load.wait(30)
            if self.fault is not None:
                raise self.fault
            return ForcedAligner(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(exact_times, "ForcedAligner", load)
        self.engine: Qwen3Engine = loaded(trained, aligner=str(aligner), max_slots=2, wake=self.woken.set)

    def start(self, name: str, lane: Lane = Lane.BATCH, *, words: bool = True) -> Qwen3Sequence:
        row = self.engine.open(SequenceRequest(name, lane, language="en", words=words))
        self.engine.feed(row, SOUND)
        self.engine.finish(row)
        return row

    def run(self, *rows: Qwen3Sequence) -> dict[str, Final]:
        """Steps until no row is ready."""
        done: dict[str, Final] = {}
        while ready := [row for row in rows if row.ready]:
            for event in self.engine.step(ready, 0):
                if isinstance(event, Final):
                    done[event.sequence.request.id] = event
        return done


@pytest.fixture
def bench(trained: Path, aligner: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(trained, aligner, monkeypatch)
    yield made
    made.may_load.set()
    made.engine.close()


def test_files_wait_without_a_step_or_a_seat_and_others_go_on(bench: Bench) -> None:
    waiting = [bench.start(f"waits {n}") for n in range(3)]
    assert bench.run(*waiting) == {}
    assert not any(row.ready or row.closed or row.slot is not None for row in waiting)
    other = bench.start("other", words=False)
    assert bench.run(*waiting, other)["other"].text
    assert not bench.woken.is_set()
    bench.may_load.set()
    assert bench.woken.wait(30)
    done = bench.run(*waiting)
    assert len(done) == 3
    assert all(final.words for final in done.values())
    assert bench.loads == 1
    assert bench.run(bench.start("later"))["later"].words


def test_a_call_does_not_wait(bench: Bench) -> None:
    call = bench.start("call", Lane.LIVE)
    assert bench.run(call)["call"].words == ()
    assert bench.loads == 1
    file = bench.start("file")
    assert bench.run(file) == {}
    bench.may_load.set()
    assert bench.woken.wait(30)
    assert bench.run(file)["file"].words
    assert bench.run(bench.start("next call", Lane.LIVE))["next call"].words


def test_who_waits_too_long_has_no_exact_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_times, "PATIENCE_S", 0.3)
    row = bench.start("row")
    assert bench.run(row) == {}
    assert bench.woken.wait(10)
    assert bench.run(row)["row"].words == ()
    assert bench.run(bench.start("late"))["late"].words == (), "the next does not wait anew"
    bench.may_load.set()
    deadline = time.monotonic() + 30
    while not bench.run(bench.start("again"))["again"].words:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("fault", "forever"),
    [
        (ModelLoadFailed("gone"), True),
        (Unsupported("no analyser"), True),
        (RuntimeError("no room"), False),
        (ModelLoadFailed("no network", retry_after=60), False),
    ],
    ids=["a broken aligner", "a language", "a full device", "a hub that does not answer"],
)
def test_an_aligner_that_cannot_be_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: Exception, forever: bool
) -> None:
    bench.fault = fault
    row = bench.start("row")
    assert bench.run(row) == {}
    bench.may_load.set()
    assert bench.woken.wait(30)
    assert bench.run(row)["row"].words == ()
    assert bench.run(bench.start("next"))["next"].words == ()
    assert bench.loads == 1
    bench.fault = None
    monkeypatch.setattr(bench.engine._exact_times, "_rest_until", 0.0)
    bench.woken.clear()
    row = bench.start("after a rest")
    done = bench.run(row)
    if not forever:
        assert bench.woken.wait(30)
        done = bench.run(row)
    assert bool(done["after a rest"].words) != forever


def test_who_leaves_while_waiting(bench: Bench) -> None:
    row = bench.start("row")
    bench.run(row)
    bench.engine.cancel(row)
    bench.may_load.set()
    assert bench.woken.wait(30)
    assert not row.ready
    assert bench.run(row) == {}


def test_room_for_an_aligner(aligner: Path) -> None:
    stored = (aligner / "model.safetensors").stat().st_size
    assert aligner_bytes(str(aligner)) - stored == 256 * 1024**2
    assert 1.9e9 < aligner_bytes("Qwen/Qwen3-ForcedAligner-0.6B-hf") < 2.3e9
