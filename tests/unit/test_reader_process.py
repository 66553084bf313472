"""Files read in processes of their own: the same segments, the same errors, and a child that dies costs nobody a word."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from shared.errors import EmptyAudio, EngineFailed, NapscribeError, UnsupportedAudio, WorkerCrashed
from shared.messages import FileOptions, Lane, RawAudio, TranscribeFile
from tests.speech import DATA, RATE, recital, wav
from tests.unit.test_feeder import AHEAD, POLICY, VAD, Bench, keys
from worker.child import NoChild
from worker.files.reader import FileReader, FileReaders, Reader, Readers, ReadersGone
from worker.files.reader_process import STRETCH_SAMPLES, ReaderProcess, RemoteReader
from worker.files.segments import Segment

CLIP = DATA / "librivox-0880.mp3"


@pytest.fixture
def process() -> Iterator[ReaderProcess]:
    made = ReaderProcess(POLICY)
    yield made
    made.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than a minute, with a pause that is longer than a stretch."""
    audio, _ = recital(2, (0.4, 1.1, 0.0, 12.5))
    path = tmp_path_factory.mktemp("recording") / "long.wav"
    path.write_bytes(wav(audio))
    return path


def asked(path: Path, **options: object) -> TranscribeFile:
    return TranscribeFile(1, path.name, Lane.BATCH, str(path), FileOptions(**options))  # type: ignore[arg-type]


def rest(reader: Reader) -> list[Segment]:
    """Everything to the end of the file."""
    segments: list[Segment] = []
    while True:
        heard = reader.advance()
        segments += heard.segments
        if heard.over:
            return segments


@cache
def here(command: TranscribeFile) -> list[Segment]:
    reader = FileReader(VAD, POLICY, command)
    segments = rest(reader)
    reader.close()
    return segments


def kill(process: ReaderProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)


# ---------------------------------------------------------------- as if it were here


@pytest.mark.parametrize("options", [{}, {"clip_seconds": 20.0}], ids=["whole", "its first 20 s"])
def test_segments_are_those_of_this_process(process: ReaderProcess, recording: Path, options: dict[str, float]) -> None:
    command = asked(recording, **options)
    found = rest(process.open(command))
    assert len(found) > 3
    assert keys(found) == keys(here(command))
    assert all(segment.audio.flags.writeable for segment in found), "an engine may want to change it in place"


def test_a_stretch_is_bounded(process: ReaderProcess, recording: Path) -> None:
    reader, samples, over = process.open(asked(recording)), 0, False
    while not over:
        heard = reader.advance()
        # The second before and the one behind come on top.
        assert heard.samples - samples <= STRETCH_SAMPLES + 2 * RATE
        samples, over = heard.samples, heard.over
        assert heard.over or heard.decode_ns > 0 < heard.vad_ns
    local = FileReader(VAD, POLICY, asked(recording))
    while not (heard := local.advance()).over:
        pass
    local.close()
    assert samples == heard.samples


def test_files_take_turns_in_one_child(process: ReaderProcess, recording: Path) -> None:
    readers = [process.open(asked(recording)) for _ in range(3)]
    found: list[list[Segment]] = [[], [], []]
    open_ = {0, 1, 2}
    while open_:
        for number in sorted(open_):
            heard = readers[number].advance()
            found[number] += heard.segments
            if heard.over:
                open_.remove(number)
    assert all(keys(segments) == keys(here(asked(recording))) for segments in found)


@pytest.mark.parametrize(
    ("body", "options", "error"),
    [
        (b"", {}, EmptyAudio),
        (bytes(range(256)) * 99, {}, UnsupportedAudio),
        (None, {}, EngineFailed),
        (bytes(100), {"raw": RawAudio("s16le", 5, 1)}, NapscribeError),
    ],
    ids=["empty", "rubbish", "missing", "an impossible rate"],
)
def test_errors_are_those_of_this_process(
    process: ReaderProcess, tmp_path: Path, body: bytes | None, options: dict[str, object], error: type[NapscribeError]
) -> None:
    path = tmp_path / "file"
    if body is not None:
        path.write_bytes(body)
    with pytest.raises(error) as caught:
        rest(process.open(asked(path, **options)))
    assert caught.value.message
    assert len(rest(process.open(asked(CLIP)))) == 1, "the child goes on"
    assert process.deaths == 0


def test_a_file_is_closed_when_it_is_over_and_when_it_is_dropped(process: ReaderProcess, recording: Path) -> None:
    def opened() -> set[str]:
        return {file.path for file in psutil.Process(process.pid).open_files()}

    dropped, whole = process.open(asked(recording)), process.open(asked(CLIP))
    dropped.advance()
    assert opened() == {str(recording), str(CLIP)}
    rest(whole)
    assert opened() == {str(recording)}
    dropped.close()
    assert opened() == set()


# ---------------------------------------------------------------- children that die


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_child_that_dies_is_replaced_and_nothing_is_lost(process: ReaderProcess, recording: Path, after: int) -> None:
    readers = [process.open(asked(recording)) for _ in range(2)]
    found: list[list[Segment]] = [[], []]
    while min(map(len, found)) < after:
        for reader, segments in zip(readers, found, strict=True):
            segments += reader.advance().segments
    kill(process)
    for reader, segments in zip(readers, found, strict=True):
        segments += rest(reader)
    assert process.deaths == 1
    assert all(keys(segments) == keys(here(asked(recording))) for segments in found)


def test_a_file_that_ends_its_reader_twice_fails_alone(process: ReaderProcess, recording: Path) -> None:
    poison, other = process.open(asked(CLIP)), process.open(asked(recording))
    kill(process)
    assert poison.advance().segments == []
    found = other.advance().segments
    kill(process)
    with pytest.raises(WorkerCrashed, match="2 times"):
        poison.advance()
    poison.close()
    assert keys(found + rest(other)) == keys(here(asked(recording)))


def test_a_segment_between_two_deaths_clears_a_file(process: ReaderProcess, recording: Path) -> None:
    reader = process.open(asked(recording))
    found: list[Segment] = []
    for deaths in (1, 2, 3):
        kill(process)
        while len(found) < deaths:
            found += reader.advance().segments
    found += rest(reader)
    assert process.deaths == 3
    assert keys(found) == keys(here(asked(recording)))


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_where_no_child_can_be_started_it_says_so(
    process: ReaderProcess, recording: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    reader = process.open(asked(recording))
    kill(process)
    assert not reader.advance().segments
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", program)
        with pytest.raises(ReadersGone, match="start"):
            reader.advance()
    assert len(rest(process.open(asked(CLIP)))) == 1, "the next one tries again"


@pytest.mark.timeout(20)
def test_a_child_that_hangs_in_its_start_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr("worker.child.START_SECONDS", 0.3)
    with pytest.raises(NoChild, match="does not start"):
        ReaderProcess(POLICY)


def test_a_child_ends_with_its_worker() -> None:
    code = (
        "import os, sys, time\nfrom tests.unit.test_feeder import POLICY\n"
        "from worker.files.reader_process import ReaderProcess\n"
        "print(ReaderProcess(POLICY).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------- under the audio threads


class Made:
    """A child for each thread; all are ended in the end."""

    def __init__(self) -> None:
        self.processes: list[ReaderProcess] = []

    def __call__(self) -> Readers:
        process = ReaderProcess(POLICY)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.close()


@pytest.fixture
def made() -> Iterator[Made]:
    factory = Made()
    yield factory
    factory.close()


def test_many_files_beside_each_other(made: Made, recording: Path) -> None:
    bench = Bench(3, own=made)
    for number in range(7):
        bench.add(f"{number}", recording if number % 2 else CLIP)
    bench.finish()
    bench.until(lambda: len(made.processes) == 3)
    expected = [keys(here(asked(path))) for path in (CLIP, recording)]
    assert all(keys(found) == expected[int(name) % 2] for name, found in bench.segments.items())
    bench.until_idle()
    assert not any(psutil.Process(process.pid).open_files() for process in made.processes)


def test_a_file_moves_to_the_child_once_it_is_there(made: Made, recording: Path) -> None:
    """The first thread begins at once, here; what it had read of a segment that was not complete is read again."""
    may_start = threading.Event()

    def own() -> Readers:
        assert may_start.wait(30)
        return made()

    def opened(pid: int) -> bool:
        return str(recording) in {file.path for file in psutil.Process(pid).open_files()}

    bench = Bench(3, own=own)
    job = bench.add("file", recording)
    bench.until(lambda: len(job.pending) >= AHEAD)
    bench.until_idle()
    assert opened(os.getpid())
    may_start.set()
    bench.until(lambda: bool(made.processes))
    bench.take()
    bench.until(lambda: opened(made.processes[0].pid))
    assert not opened(os.getpid())
    bench.finish()
    assert keys(bench.segments["file"]) == keys(here(asked(recording)))
    assert len(made.processes) == bench.feeder.threads == 1


def test_without_a_file_nobody_asks_for_a_child() -> None:
    asked: list[None] = []

    def own() -> Readers:
        asked.append(None)
        raise NoChild

    Bench(3, own=own).until_idle()
    assert not asked


def test_children_that_die_under_threads(made: Made, recording: Path) -> None:
    bench = Bench(3, own=made)
    for number in range(6):
        bench.add(f"{number}", recording)
    deaths = 0

    def some_heard() -> bool:
        bench.take()
        return sum(map(len, bench.segments.values())) > 6 * deaths and len(made.processes) == 3

    while deaths < 3:
        bench.until(some_heard)
        with contextlib.suppress(ProcessLookupError):  # one that died before and has no work has no successor yet
            kill(made.processes[deaths % len(made.processes)])
        deaths += 1
    bench.finish()
    assert all(keys(found) == keys(here(asked(recording))) for found in bench.segments.values())


def test_without_children_the_first_thread_reads_all_here(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    bench = Bench(4, own=Made())
    for number in range(3):
        bench.add(f"{number}", recording)
    bench.finish()
    assert all(keys(found) == keys(here(asked(recording))) for found in bench.segments.values())


def test_a_thread_whose_child_cannot_be_replaced_reads_on_itself(
    made: Made, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(2, own=made)
    for number in range(4):
        bench.add(f"{number}", recording)
    bench.until(lambda: len(made.processes) == 2 and all(job.duration_samples for job in bench.jobs.values()))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for process in made.processes:
        kill(process)
    for number in range(4, 8):
        bench.add(f"{number}", recording)
    jobs = list(bench.jobs.values())
    bench.finish()
    assert [job.error for job in jobs] == [None] * 8
    assert all(keys(found) == keys(here(asked(recording))) for found in bench.segments.values())


class Slow(Made):
    """No thread beside the first is done starting until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = threading.Event()

    def __call__(self) -> Readers:
        assert self.may_start.wait(30)
        return FileReaders(VAD, POLICY)


def test_a_file_does_not_wait_for_a_thread_that_starts_while_another_is_idle(recording: Path) -> None:
    slow = Slow()
    bench = Bench(2, own=slow)
    full = bench.add("full", recording, Lane.INTERACTIVE)
    bench.until(lambda: len(full.pending) >= AHEAD)
    clip = bench.add("clip", CLIP, Lane.INTERACTIVE)
    bench.until(lambda: clip.exhausted)
    assert bench.feeder.threads == 2
    urgent = bench.add("urgent", CLIP, Lane.INTERACTIVE)
    bench.until(lambda: urgent.exhausted)
    slow.may_start.set()
    bench.finish()


def test_a_new_file_is_left_to_a_thread_that_starts_while_the_first_is_busy(recording: Path) -> None:
    """Else the first would have opened everything before the others are there."""
    slow = Slow()
    bench = Bench(2, own=slow, ahead=1_000)
    busy = bench.add("busy", recording)
    bench.until(lambda: busy.duration_samples > 0)
    busy.attained = RATE  # it has had more than the next, which would go first
    new = bench.add("new", recording)
    bench.until(lambda: busy.exhausted)
    assert not new.duration_samples
    slow.may_start.set()
    bench.finish()


def test_a_thread_that_fails_in_its_start_leaves_its_files_to_the_others(recording: Path) -> None:
    def own() -> Readers:
        raise MemoryError

    bench = Bench(3, own=own)
    for number in range(3):
        bench.add(f"{number}", recording)
    bench.finish()
    assert all(keys(found) == keys(here(asked(recording))) for found in bench.segments.values())


def test_readers_agree_with_their_protocol(process: ReaderProcess) -> None:
    readers: list[Readers] = [process, FileReaders(VAD, POLICY)]
    opened: list[Reader] = [each.open(asked(CLIP)) for each in readers]
    assert [type(each) for each in opened] == [RemoteReader, FileReader]
    for reader in opened:
        reader.close()
