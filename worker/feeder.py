"""The audio threads: decode files and cut them into segments, one second of one file at a time, best lane first.

They run ahead of the engine by a few segments of each file and of all files together, so that memory grows neither with a
file's length nor with their number, and a short file never waits until a long one is decoded.

A file is in the hands of one thread at a time, so its segments are the same with any number of threads. Decoder, resampler
and VAD let go of the interpreter while they work. A thread is made when there is a file that nobody has time for; one file
alone never needs a second.
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
from shared.messages import Lane
from shared.pcm import seconds
from shared.recorder import AUDIO_THREADS, Recorder, Slot
from worker.decode import AudioFile
from worker.engines.base import Audio
from worker.file_job import FileJob
from worker.inbox import Bell
from worker.segments import Segmenter, SegmentPolicy
from worker.vad import SileroVad

MAX_AHEAD = 64


@dataclass(slots=True)
class _Reader:
    """An open file, with what cuts it."""

    file: AudioFile
    chunks: Iterator[Audio]
    segmenter: Segmenter

    def close(self) -> None:
        self.file.__exit__(None, None, None)


@dataclass(slots=True, eq=False)
class _Reading:
    """A job's file. ``busy`` and ``dropped`` are written under the feeder's lock; ``reader`` belongs to the thread that made it
    busy."""

    job: FileJob
    reader: _Reader | None = None
    busy: bool = False
    dropped: bool = False

    def close(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


class Feeder:
    """Owns the files and their segmenters; hands finished segments to their jobs."""

    def __init__(
        self, vad: SileroVad, policy: SegmentPolicy, ahead: int, bell: Bell, recorder: Recorder, *,
        most: int = 1_000, threads: int = 1,
    ) -> None:  # fmt: skip
        """``ahead``: segments of one file that may wait for the engine. ``most``: segments of all files, those in the engine
        included, from which on a file that has some waits. ``threads``: at most so many, up to ``AUDIO_THREADS``, which have slots
        in the recorder."""
        self._vad = vad
        self._policy = policy
        self._ahead = ahead
        self._bell = bell
        self._recorder = recorder
        self._most = most
        self._most_threads = min(threads, AUDIO_THREADS)
        self._readings: dict[str, _Reading] = {}
        self._dropped: collections.deque[_Reading] = collections.deque()
        """To be closed, by an audio thread: only they touch decoders."""
        self._wanted = threading.Condition()
        self._free = 0
        """Threads that have no file in hand."""
        self._began_ns: list[int] = []
        """Of the piece of work that each thread has in hand, 0 for none."""

    def start(self) -> None:
        with self._wanted:
            self._grow()

    def add(self, job: FileJob) -> None:
        with self._wanted:
            self._readings[job.id] = _Reading(job)
            if self._free:
                self._wanted.notify()
            else:
                self._grow()

    def drop(self, job: FileJob) -> None:
        """Forget a file, finished or not."""
        with self._wanted:
            reading = self._readings.pop(job.id, None)
            if reading is not None:
                reading.dropped = True
                self._dropped.append(reading)
                self._wanted.notify()

    def nudge(self) -> None:
        """A job has room again."""
        with self._wanted:
            self._wanted.notify()

    def age_ns(self) -> int:
        """How long the oldest running piece of work has been running; 0 when there is none."""
        now = time.monotonic_ns()
        return max((now - began for began in self._began_ns if began), default=0)

    @property
    def threads(self) -> int:
        """So many there are."""
        return len(self._began_ns)

    # ------------------------------------------------------------ the audio threads

    def _run(self, number: int) -> None:
        slot = Slot.AUDIO + number
        reading: _Reading | None = None
        while True:
            with self._wanted:
                if reading is not None:
                    reading.busy = False
                    self._free += 1
                reading = self._take()
                self._free -= 1
                if not self._free and self._wanting():
                    self._grow()
            job = reading.job
            self._began_ns[number] = time.monotonic_ns()
            self._recorder.begin(slot, [(job.id, job.command.next_index)])
            try:
                self._work(reading)
            finally:
                self._recorder.end(slot)
                self._began_ns[number] = 0

    def _take(self) -> _Reading:
        """The next file to work on, which is busy from now on. Waits for one; the lock is held."""
        while True:
            dropped = next((reading for reading in self._dropped if not reading.busy), None)
            if dropped is not None:
                self._dropped.remove(dropped)
                return dropped
            if wanting := self._wanting():
                best = min(wanting, key=lambda reading: reading.job.priority)
                best.busy = True
                return best
            self._wanted.wait()

    def _wanting(self) -> list[_Reading]:
        """Files that a thread may take now. Segments of worse lanes do not count against a better one's, and a file that has none
        may always make one; so nobody waits for ever for others to be done."""
        held: collections.Counter[Lane] = collections.Counter()
        for reading in self._readings.values():
            held[reading.job.lane] += reading.job.held
        full = {lane for lane in Lane if sum(held[better] for better in Lane if better <= lane) >= self._most}
        return [
            reading
            for reading in self._readings.values()
            if not reading.busy
            and not reading.job.exhausted
            and len(reading.job.pending) < self._ahead
            and not (reading.job.lane in full and reading.job.held)
        ]

    def _grow(self) -> None:
        """One thread more, if that is allowed and the system has one; the lock is held."""
        number = len(self._began_ns)
        if number >= self._most_threads:
            return
        thread = threading.Thread(target=self._run, args=(number,), name=f"audio-{number}", daemon=True)
        self._began_ns.append(0)
        self._free += 1
        try:
            thread.start()
        except RuntimeError as error:
            if not number:
                raise
            self._began_ns.pop()
            self._free -= 1
            self._most_threads = number
            log("no more audio threads", level="warning", threads=number, error=str(error))

    def _work(self, reading: _Reading) -> None:
        if reading.dropped:
            reading.close()
            return
        try:
            self._advance(reading)
        except NapscribeError as error:
            self._give_up(reading, error)
        except Exception as error:
            log("reading failed", level="error", request_id=reading.job.id, error=repr(error))
            self._give_up(reading, EngineFailed(f"Reading the audio failed: {type(error).__name__}."))

    def _advance(self, reading: _Reading) -> None:
        """One chunk of audio of this file, and the segments that it completes."""
        began = time.monotonic_ns()
        job = reading.job
        reader = reading.reader or self._open(reading)
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
            reading.close()
        if segments or chunk is None:
            self._bell.ring()

    def _open(self, reading: _Reading) -> _Reader:
        command, options = reading.job.command, reading.job.command.options
        file = AudioFile(
            Path(command.path), raw=options.raw, max_seconds=options.max_seconds, base_sample=command.base_sample
        )
        segmenter = Segmenter(self._vad, self._policy, base_sample=command.base_sample, next_index=command.next_index)
        reading.reader = reader = _Reader(file.__enter__(), iter(file), segmenter)
        return reader

    def _give_up(self, reading: _Reading, error: NapscribeError) -> None:
        job = reading.job
        with job.lock:
            job.error = error
            job.exhausted = True
        reading.close()
        self._bell.ring()


def audio_threads(cores: int) -> int:
    """At most so many threads hear files: half of the cores. The rest is the engine's and the gateway's, and on two cores a
    second thread would only take from them."""
    return max(1, min(cores // 2, AUDIO_THREADS))


def read_ahead(max_batch: int) -> int:
    """Segments of one file that may wait: enough to fill a batch, two for an engine that takes one at a time.

    At most MAX_AHEAD: an engine with hundreds of slots is faster than an audio thread, so more would only be memory (1.9 MB for
    30 s).
    """
    return max(2, min(max_batch, MAX_AHEAD))
