"""The audio thread: decodes files and cuts them into segments, one second of one file at a time, best lane first.

It runs ahead of the engine by a few segments of each file and no more, so that memory does not grow with a file's
length, and a short file never waits until a long one is decoded.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import EngineFailed, NapscribeError
from shared.journal import log
from shared.pcm import seconds
from shared.recorder import Recorder, Slot
from worker.decode import AudioFile
from worker.engines.base import Audio
from worker.file_job import FileJob
from worker.inbox import Bell
from worker.segments import Segmenter, SegmentPolicy
from worker.vad import SileroVad


@dataclass(slots=True)
class _Reader:
    """A file being read, with what cuts it."""

    file: AudioFile
    chunks: Iterator[Audio]
    segmenter: Segmenter


class Feeder:
    """Owns the files and their segmenters; hands finished segments to their jobs."""

    def __init__(self, vad: SileroVad, policy: SegmentPolicy, ahead: int, bell: Bell, recorder: Recorder) -> None:
        """``ahead``: segments of one file that may wait for the engine."""
        self._vad = vad
        self._policy = policy
        self._ahead = ahead
        self._bell = bell
        self._recorder = recorder
        self._jobs: dict[str, FileJob] = {}
        self._readers: dict[str, _Reader] = {}
        self._dropped: collections.deque[str] = collections.deque()
        self._wanted = threading.Condition()
        self._began_ns = 0
        self._thread = threading.Thread(target=self._run, name="audio", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, job: FileJob) -> None:
        with self._wanted:
            self._jobs[job.id] = job
            self._wanted.notify()

    def drop(self, job: FileJob) -> None:
        """Forget a file, finished or not."""
        with self._wanted:
            if self._jobs.pop(job.id, None) is not None:
                self._dropped.append(job.id)
            self._wanted.notify()

    def nudge(self) -> None:
        """A job has room again."""
        with self._wanted:
            self._wanted.notify()

    def age_ns(self) -> int:
        """How long the running piece of work has been running; 0 when there is none."""
        began = self._began_ns
        return time.monotonic_ns() - began if began else 0

    # ------------------------------------------------------------ the audio thread

    def _run(self) -> None:
        while True:
            with self._wanted:
                while self._dropped:
                    self._close(self._dropped.popleft())
                job = self._next()
                if job is None:
                    self._wanted.wait()
                    continue
            self._began_ns = time.monotonic_ns()
            self._recorder.begin(Slot.AUDIO, [(job.id, job.command.next_index)])
            try:
                self._advance(job)
            except NapscribeError as error:
                self._give_up(job, error)
            except Exception as error:
                log("reading failed", level="error", request_id=job.id, error=repr(error))
                self._give_up(job, EngineFailed(f"Reading the audio failed: {type(error).__name__}."))
            finally:
                self._recorder.end(Slot.AUDIO)
                self._began_ns = 0

    def _next(self) -> FileJob | None:
        wanting = [job for job in self._jobs.values() if not job.exhausted and len(job.pending) < self._ahead]
        return min(wanting, key=lambda job: job.priority, default=None)

    def _advance(self, job: FileJob) -> None:
        """One chunk of audio of this job, and the segments that it completes."""
        began = time.monotonic_ns()
        reader = self._readers.get(job.id) or self._open(job)
        clip = job.command.options.clip_seconds
        chunk = None if clip and seconds(reader.file.samples) >= clip else next(reader.chunks, None)
        decoded = time.monotonic_ns()
        segments = reader.segmenter.flush() if chunk is None else reader.segmenter.push(chunk)
        with job.lock:
            job.decode_ns += decoded - began
            job.vad_ns += time.monotonic_ns() - decoded
            job.pending.extend(segments)
            job.exhausted = chunk is None
            job.duration_samples = reader.file.samples
        if chunk is None:
            self._close(job.id)
        if segments or chunk is None:
            self._bell.ring()

    def _open(self, job: FileJob) -> _Reader:
        command, options = job.command, job.command.options
        file = AudioFile(
            Path(command.path), raw=options.raw, max_seconds=options.max_seconds, base_sample=command.base_sample
        )
        segmenter = Segmenter(self._vad, self._policy, base_sample=command.base_sample, next_index=command.next_index)
        reader = _Reader(file.__enter__(), iter(file), segmenter)
        self._readers[job.id] = reader
        return reader

    def _close(self, request_id: str) -> None:
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            reader.file.__exit__(None, None, None)

    def _give_up(self, job: FileJob, error: NapscribeError) -> None:
        with job.lock:
            job.error = error
            job.exhausted = True
        self._close(job.id)
        self._bell.ring()


def read_ahead(max_batch: int) -> int:
    """Segments of one file that may wait: enough to fill a batch, two for an engine that takes one at a time."""
    return max(2, max_batch)
