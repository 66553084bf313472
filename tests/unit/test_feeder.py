"""The audio threads with real files: many at once are as each alone, and no file is in another's way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.messages import FileOptions, Lane, TranscribeFile
from shared.recorder import AUDIO_THREADS, Recorder
from tests.speech import DATA, RATE, encode, recital, wav
from worker.audio.decode import AudioFile
from worker.audio.vad import SileroVad
from worker.files.feeder import Feeder, audio_threads, read_ahead
from worker.files.file_job import FileJob
from worker.files.reader import FileReaders, Readers
from worker.files.segments import Segment, Segmenter, SegmentPolicy
from worker.inbox import Bell

VAD = SileroVad()
POLICY = SegmentPolicy(max_s=4.0, aim_s=3.0)
HERE = FileReaders(VAD, POLICY)
AHEAD = 2


class Watched(Recorder):
    """Remembers the files that were taken in hand, in order."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.taken: list[str] = []

    def begin(self, slot: int, work: object) -> None:
        super().begin(slot, work)  # type: ignore[arg-type]
        self.taken += [request_id for request_id, _ in work]  # type: ignore[attr-defined]

    @property
    def order(self) -> list[str]:
        """Files by the moment when they were first taken in hand."""
        return list(dict.fromkeys(self.taken))


class Bench:
    """A feeder and its files, whose segments are taken as an engine would."""

    def __init__(
        self,
        threads: int,
        *,
        ahead: int = AHEAD,
        most: int = 1_000,
        own: Callable[[], Readers] | None = None,
    ) -> None:
        descriptor = Recorder.create()
        self.recorder = Watched(descriptor)
        os.close(descriptor)
        self.bell = Bell()
        self.feeder = Feeder(HERE, ahead, self.bell, self.recorder, own=own, most=most, threads=threads)
        self.feeder.start()
        self.jobs: dict[str, FileJob] = {}
        self.segments: dict[str, list[Segment]] = {}

    def add(self, name: str, path: Path, lane: Lane = Lane.BATCH, base: int = 0, index: int = 0) -> FileJob:
        command = TranscribeFile(1, name, lane, str(path), FileOptions(), base_sample=base, next_index=index)
        job = FileJob(command, len(self.jobs))
        self.jobs[name], self.segments[name] = job, []
        self.feeder.add(job)
        return job

    def drop(self, name: str) -> None:
        self.feeder.drop(self.jobs.pop(name))

    def take(self) -> None:
        """What waits now."""
        for name, job in self.jobs.items():
            with job.lock:
                taken = [job.pending.popleft() for _ in range(len(job.pending))]
            self.segments[name] += taken
            if taken:
                self.feeder.nudge()

    def finish(self) -> None:
        """Take everything of all files; those that are finished are dropped, as by the scheduler."""

        def step() -> bool:
            self.take()
            for name in [name for name, job in self.jobs.items() if job.finished]:
                self.drop(name)
            return not self.jobs

        self.until(step)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.bell.wait(0.01)

    def until_idle(self) -> None:
        """Nothing is left to do, and nobody does anything."""

        def idle() -> bool:
            feeder = self.feeder
            with feeder._wanted:
                left = feeder._dropped or feeder._wanting()
                return all(thread.free for thread in feeder._threads) and not left

        self.until(idle)


class Stuck:
    """A file that takes a thread and does not let it go until ``release``: opening a pipe waits for its writer."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    def release(self) -> None:
        self.path.open("wb").close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings of all kinds, from three seconds to more than a minute."""
    folder = tmp_path_factory.mktemp("files")
    audio, _ = recital(2, (0.4, 1.1, 0.0, 2.5))
    made = {
        "long.wav": wav(audio),
        "long.mp3": encode(audio[: 25 * RATE], "mp3", "libmp3lame", rate=44_100, channels=2),
        "long.flac": encode(audio[20 * RATE : 45 * RATE], "flac", "flac", rate=48_000),
        "long.webm": encode(audio[50 * RATE :], "webm", "libopus", rate=48_000),
    }
    for name, body in made.items():
        (folder / name).write_bytes(body)
    paths = [folder / name for name in made] + [
        DATA / "jfk.wav",
        DATA / "librivox-0880.m4a",
        DATA / "librivox-0880.mp3",
    ]
    return {path.name: path for path in paths}


def keys(segments: list[Segment]) -> list[tuple[object, ...]]:
    return [
        (
            found.index,
            found.start_sample,
            found.speech_end_sample,
            found.end_sample,
            found.speech,
            found.audio.tobytes(),
        )
        for found in segments
    ]


def alone(path: Path) -> list[Segment]:
    segmenter = Segmenter(VAD, POLICY)
    with AudioFile(path) as file:
        segments = [found for chunk in file for found in segmenter.push(chunk)]
    return segments + segmenter.flush()


@pytest.fixture(scope="module")
def expected(files: dict[str, Path]) -> dict[str, list[tuple[object, ...]]]:
    return {name: keys(alone(path)) for name, path in files.items()}


def opened(path: Path) -> bool:
    """Whether this process has it open."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.readlink() == path:
                return True
        except FileNotFoundError:
            continue
    return False


# ---------------------------------------------------------------- many at once


@pytest.mark.parametrize("threads", [1, 2, AUDIO_THREADS])
def test_files_beside_each_other_have_the_segments_that_each_has_alone(
    files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]], threads: int
) -> None:
    bench = Bench(threads)
    for round_ in range(2):
        for name, path in files.items():
            bench.add(f"{round_} {name}", path)
    bench.finish()
    assert 1 <= bench.feeder.threads <= threads
    for name, found in bench.segments.items():
        assert keys(found) == expected[name.split()[1]], name
    assert len(bench.segments) == 2 * len(files)
    bench.until_idle()
    assert not any(map(opened, files.values()))
    assert bench.recorder.read() == {}


def test_a_resumed_file_beside_others(files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]]) -> None:
    bench = Bench(3)
    whole = alone(files["long.mp3"])
    for done in (1, len(whole) // 2, len(whole) - 1):
        bench.add(str(done), files["long.mp3"], base=whole[done - 1].end_sample, index=done)
    bench.finish()
    for name, found in bench.segments.items():
        assert keys(found) == expected["long.mp3"][int(name) :]


def test_threads_run_ahead_by_a_few_segments_of_each_file(files: dict[str, Path]) -> None:
    bench = Bench(4)
    jobs = [bench.add(f"{n}", files["long.wav"]) for n in range(6)]
    bench.until(lambda: all(len(job.pending) >= AHEAD for job in jobs))
    bench.until_idle()
    block_s = 2  # a second of audio may complete a segment and hold the end of the next
    for job in jobs:
        assert AHEAD <= len(job.pending) <= AHEAD + block_s
        assert job.duration_samples <= job.pending[-1].end_sample + (POLICY.max_s + block_s) * RATE
    bench.finish()


def test_a_thread_is_made_when_a_file_waits_for_one(files: dict[str, Path], tmp_path: Path) -> None:
    bench = Bench(3)
    bench.add("one", files["long.wav"])
    bench.finish()
    bench.until_idle()
    bench.add("another", files["long.mp3"])
    bench.finish()
    assert bench.feeder.threads == 1
    stuck = [Stuck(tmp_path / f"{n}") for n in range(4)]
    for each in stuck:
        bench.add(each.path.name, each.path)
    bench.until(lambda: len(bench.recorder.read()) == 3)
    assert bench.feeder.threads == 3
    for each in stuck:
        each.release()
    bench.finish()


def test_a_system_that_has_no_more_threads(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(4)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for name, path in files.items():
        bench.add(name, path)
    bench.finish()
    assert bench.feeder.threads == 1


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (128, AUDIO_THREADS)])
def test_threads_by_cores(cores: int, threads: int) -> None:
    assert audio_threads(cores) == threads


# ---------------------------------------------------------------- in nobody's way


@pytest.fixture(params=[1, 2, 4])
def busy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Bench, list[Stuck]]]:
    """All threads are held by files that do not go on."""
    bench = Bench(request.param)
    stuck = [Stuck(tmp_path / f"stuck{n}") for n in range(request.param)]
    for each in stuck:
        bench.add(each.path.name, each.path, Lane.INTERACTIVE)
    bench.until(lambda: len(bench.recorder.read()) == len(stuck))
    yield bench, stuck
    bench.finish()
    for each in stuck:
        assert bench.segments[each.path.name] == []


def test_the_recorder_names_every_file_in_hand(busy: tuple[Bench, list[Stuck]], files: dict[str, Path]) -> None:
    bench, stuck = busy
    bench.add("waits", files["jfk.wav"])
    assert bench.recorder.read() == {each.path.name: 0 for each in stuck}
    assert bench.feeder.age_ns() > 0
    for each in stuck:
        each.release()
    bench.finish()
    bench.until_idle()
    assert bench.recorder.read() == {}
    assert bench.feeder.age_ns() == 0


def test_best_lane_first_then_who_came_first(busy: tuple[Bench, list[Stuck]], files: dict[str, Path]) -> None:
    """One thread is let go, and works through what waits."""
    bench, stuck = busy
    bench.add("batch 1", files["jfk.wav"], Lane.BATCH)
    bench.add("batch 2", files["librivox-0880.mp3"], Lane.BATCH)
    bench.add("interactive 1", files["librivox-0880.m4a"], Lane.INTERACTIVE)
    bench.add("interactive 2", files["jfk.wav"], Lane.INTERACTIVE)
    stuck[0].release()
    names = ["interactive 1", "interactive 2", "batch 1", "batch 2"]

    def heard() -> bool:
        bench.take()
        return all(bench.jobs[name].finished for name in names)

    bench.until(heard)
    assert bench.recorder.order[len(stuck) :] == names
    for each in stuck[1:]:
        each.release()


def test_a_file_that_holds_its_thread_holds_up_nobody_else(
    files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]], tmp_path: Path
) -> None:
    bench = Bench(2)
    stuck = Stuck(tmp_path / "stuck")
    bench.add("stuck", stuck.path, Lane.INTERACTIVE)
    for name, path in files.items():
        bench.add(name, path)

    def heard() -> bool:
        bench.take()
        return all(bench.jobs[name].finished for name in files)

    bench.until(heard)
    bench.until(lambda: bench.recorder.read() == {"stuck": 0})  # the last to be heard may be in hand a moment longer
    stuck.release()
    bench.finish()
    assert {name: keys(bench.segments[name]) for name in files} == expected


def test_a_file_that_fails_fails_alone(
    files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]], tmp_path: Path
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "rubbish").write_bytes(bytes(range(256)) * 100)
    bench = Bench(3)
    codes = {"empty": "empty_audio", "rubbish": "unsupported_audio", "missing": "engine_failed"}
    failing = {name: bench.add(name, tmp_path / name) for name in codes}
    for name, path in files.items():
        bench.add(name, path)
    bench.finish()
    assert {name: job.error.code for name, job in failing.items() if job.error} == codes
    assert {name: keys(bench.segments[name]) for name in files} == expected
    bench.until_idle()
    assert not opened(tmp_path / "rubbish")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_is_dropped_in_the_middle_is_closed_and_the_others_go_on(
    files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]], threads: int
) -> None:
    bench = Bench(threads)
    for name, path in files.items():
        bench.add(name, path)
    leaves = ["long.mp3", "long.flac"]
    bench.until(lambda: all(bench.jobs[name].duration_samples for name in leaves))
    assert all(opened(files[name]) for name in leaves)
    gone = [bench.jobs[name] for name in leaves]
    for name in leaves:
        bench.drop(name)
    bench.until_idle()
    assert not any(opened(files[name]) for name in leaves)
    bench.finish()
    assert not any(job.exhausted for job in gone)
    for name in files:
        if name not in leaves:
            assert keys(bench.segments[name]) == expected[name]


def test_a_file_that_is_dropped_while_a_thread_has_it_in_hand(busy: tuple[Bench, list[Stuck]]) -> None:
    bench, stuck = busy
    names = [each.path.name for each in stuck]
    for name in names:
        bench.drop(name)
    assert set(bench.recorder.read()) == set(names)
    for each in stuck:
        each.release()
    bench.until_idle()
    assert not any(opened(each.path) for each in stuck)
    assert bench.recorder.read() == {}


@pytest.mark.parametrize(("slots", "segments"), [(1, 2), (8, 8), (384, 64)])
def test_read_ahead_is_bounded(slots: int, segments: int) -> None:
    assert read_ahead(slots) == segments


def test_all_files_together_are_bounded_and_a_better_lane_does_not_wait_for_it(
    files: dict[str, Path], expected: dict[str, list[tuple[object, ...]]]
) -> None:
    bench = Bench(1, ahead=4, most=5)
    for number in range(4):
        bench.add(f"file-{number}", files["long.wav"])
    bench.until_idle()
    assert [len(job.pending) for job in bench.jobs.values()] == [4, 1, 1, 1], "whoever has none may make one"
    bench.add("urgent", files["long.wav"], Lane.INTERACTIVE)
    bench.until_idle()
    assert [len(job.pending) for job in bench.jobs.values()] == [4, 1, 1, 1, 4]
    bench.finish()
    assert all(keys(segments) == expected["long.wav"] for segments in bench.segments.values())


def test_what_a_forgotten_file_held_is_free_again(files: dict[str, Path]) -> None:
    bench = Bench(1, ahead=4, most=4)
    bench.add("first", files["long.wav"])
    second = bench.add("second", files["long.wav"])
    bench.until_idle()
    assert len(second.pending) == 1
    bench.drop("first")
    bench.until_idle()
    assert len(second.pending) == 4
