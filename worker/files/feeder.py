"""The audio threads: decode files and cut them into segments, one second of one file at a time, best lane first.

They run ahead of the engine by a few segments of each file and of all files together, so that memory grows neither with a
file's length nor with their number, and a short file never waits until a long one is decoded.

A file stays with the thread that opened it. A thread is made when there is a file that nobody has time for; one file alone never
needs a second. Threads may have a child each that reads for them (``worker.files.reader_process``). It takes half a second to start, so the
first thread, which serves a worker that has just woken, begins in this process meanwhile; its files move to the child as soon as it is
there. What becomes of a file behind a cut depends on nothing before it (``worker.files.segments``), so its segments are the same with any
number of threads, here or in children.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from shared.errors import EngineFailed, NapscribeError
from shared.journal import log
from shared.messages import Lane, TranscribeFile
from shared.recorder import AUDIO_THREADS, Recorder, Slot
from worker.files.file_job import FileJob
from worker.files.reader import Heard, Reader, Readers, ReadersGone
from worker.inbox import Bell

MAX_AHEAD = 64


@dataclass(slots=True, eq=False)
class _Reading:
    """A job's file. What is behind ``command`` belongs to ``owner``; the rest is written under the feeder's lock."""

    job: FileJob
    command: TranscribeFile
    """Where another reader would go on."""
    reader: Reader | None = None
    readers: Readers | None = None
    """Which opened it."""
    owner: int = -1
    """The thread that opened it; -1 before."""
    busy: bool = False
    dropped: bool = False

    def advance(self, readers: Readers) -> Heard:
        """The next stretch, read by ``readers``. Raises what they raise."""
        began = time.monotonic_ns()
        if self.reader is None or self.readers is not readers:
            self.close()
            self.reader, self.readers = readers.open(self.command), readers
        opened_ns = time.monotonic_ns() - began
        heard = self.reader.advance()
        if heard.segments:
            last = heard.segments[-1]
            self.command = msgspec.structs.replace(self.command, base_sample=last.end_sample, next_index=last.index + 1)
        return replace(heard, decode_ns=opened_ns + heard.decode_ns)

    def close(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


@dataclass(slots=True)
class _Thread:
    """What the feeder knows of an audio thread."""

    readers: Readers | None = None
    """None while it starts."""
    free: bool = False
    """It waits for work."""
    began_ns: int = 0
    """When the piece of work that it has in hand began; 0 for none."""


class Feeder:
    """Owns the files and their readers; hands finished segments to their jobs."""

    def __init__(
        self, here: Readers, ahead: int, bell: Bell, recorder: Recorder, *,
        own: Callable[[], Readers] | None = None, most: int = 1_000, threads: int = 1,
    ) -> None:  # fmt: skip
        """``here``: reads in this process, for any thread. ``own``: makes what one thread alone reads with, if that is better; may take
        its time, and may raise. ``ahead``: segments of one file that may wait for the engine. ``most``: segments of all files, those
        in the engine included, from which on a file that has some waits. ``threads``: at most so many, up to ``AUDIO_THREADS``,
        which have slots in the recorder."""
        self._here = here
        self._own = own
        self._ahead = ahead
        self._bell = bell
        self._recorder = recorder
        self._most = most
        self._most_threads = min(threads, AUDIO_THREADS)
        self._readings: dict[str, _Reading] = {}
        self._dropped: collections.deque[_Reading] = collections.deque()
        """To be closed by the threads that opened them: only they touch decoders."""
        self._wanted = threading.Condition()
        self._threads: list[_Thread] = []

    def start(self) -> None:
        with self._wanted:
            self._grow()

    def add(self, job: FileJob) -> None:
        with self._wanted:
            self._readings[job.id] = _Reading(job, job.command)
            self._look_for_hands()

    def drop(self, job: FileJob) -> None:
        """Forget a file, finished or not."""
        with self._wanted:
            reading = self._readings.pop(job.id, None)
            if reading is not None:
                reading.dropped = True
                if reading.owner >= 0:
                    self._dropped.append(reading)
                # Besides its thread: others may have waited for the room that it took.
                self._wanted.notify_all()
                self._look_for_hands()

    def nudge(self) -> None:
        """A job has room again."""
        with self._wanted:
            self._wanted.notify_all()

    def age_ns(self) -> int:
        """How long the oldest running piece of work has been running; 0 when there is none."""
        now = time.monotonic_ns()
        return max((now - thread.began_ns for thread in list(self._threads) if thread.began_ns), default=0)

    @property
    def threads(self) -> int:
        """So many there are."""
        return len(self._threads)

    # ------------------------------------------------------------ the audio threads

    def _run(self, number: int) -> None:
        thread, slot = self._threads[number], Slot.AUDIO + number
        try:
            readers = self._own() if number and self._own else self._here
        except Exception as error:
            self._leave(number, error)
            return
        equipped = readers is not self._here or self._own is None
        with self._wanted:
            # Both at once: in between it would count as one that has something in hand.
            thread.readers, thread.free = readers, True
        reading: _Reading | None = None
        while True:
            with self._wanted:
                if reading is not None:
                    reading.busy = False
                thread.free = True
                reading = self._take(number)
                thread.free = False
                # Whoever has something in hand does not take what is left.
                self._look_for_hands()
            if not equipped:
                equipped = True
                threading.Thread(target=self._equip, args=(thread,), name="audio-equip", daemon=True).start()
            job = reading.job
            thread.began_ns = time.monotonic_ns()
            self._recorder.begin(slot, [(job.id, job.command.next_index)])
            try:
                self._work(reading, thread)
            finally:
                self._recorder.end(slot)
                thread.began_ns = 0

    def _take(self, number: int) -> _Reading:
        """The next file for this thread, which is busy from now on. Waits for one; the lock is held."""
        while True:
            for reading in self._dropped:
                if reading.owner == number:
                    self._dropped.remove(reading)
                    return reading
            if best := min(self._for(number), key=lambda reading: reading.job.priority, default=None):
                best.owner, best.busy = number, True
                return best
            self._wanted.wait()

    def _for(self, number: int) -> list[_Reading]:
        """Files that want to be read and may be by this thread: its own, and those that nobody has. While its own want to be read,
        it leaves new ones to threads that have fewer and are free or about to be, but for those of a better lane."""
        wanting = self._wanting()
        own = [reading for reading in wanting if reading.owner == number]
        new = [reading for reading in wanting if reading.owner < 0]
        open_files = self._open_files()
        others = (
            open_files[other] < open_files[number] and (thread.free or thread.readers is None)
            for other, thread in enumerate(self._threads)
        )
        if own and any(others):
            best = min(reading.job.lane for reading in own)
            new = [reading for reading in new if reading.job.lane < best]
        return own + new

    def _open_files(self) -> collections.Counter[int]:
        """By thread."""
        readings = self._readings.values()
        return collections.Counter(reading.owner for reading in readings if not reading.job.exhausted)

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

    def _look_for_hands(self) -> None:
        """If there are new files, wake who waits, and make a thread if there are more of them than threads without any; the lock is
        held."""
        new = sum(reading.owner < 0 for reading in self._wanting())
        if not new:
            return
        self._wanted.notify_all()
        open_files = self._open_files()
        unused = (
            thread.readers is None or (thread.free and not open_files[number])
            for number, thread in enumerate(self._threads)
        )
        if new > sum(unused):
            self._grow()

    def _grow(self) -> None:
        """One thread more, if that is allowed and the system has one; the lock is held."""
        number = len(self._threads)
        if number >= self._most_threads:
            return
        thread = threading.Thread(target=self._run, args=(number,), name=f"audio-{number}", daemon=True)
        self._threads.append(_Thread())
        try:
            thread.start()
        except RuntimeError as error:
            if not number:
                raise
            self._threads.pop()
            self._stop_growing(number, error)

    def _equip(self, thread: _Thread) -> None:
        """The first thread's own, which it uses from its next stretch on."""
        assert self._own is not None
        try:
            readers = self._own()
        except Exception as error:
            log("reading goes on in the worker", level="warning", error=str(error))
            return
        with self._wanted:
            thread.readers = readers
        threading.Event().wait()  # the kernel ends a child with the thread that made it (PDEATHSIG): this one stays

    def _leave(self, number: int, error: Exception) -> None:
        """A thread that has nothing to read with; the first always has."""
        with self._wanted:
            self._threads[number].readers = self._here  # it starts no more
            self._stop_growing(number, error)
            self._wanted.notify_all()

    def _stop_growing(self, number: int, error: Exception) -> None:
        self._most_threads = min(self._most_threads, number)
        log("no more audio threads", level="warning", threads=number, error=str(error))

    def _work(self, reading: _Reading, thread: _Thread) -> None:
        if reading.dropped:
            reading.close()
            return
        try:
            self._advance(reading, thread)
        except NapscribeError as error:
            self._give_up(reading, error)
        except Exception as error:
            log("reading failed", level="error", request_id=reading.job.id, error=repr(error))
            self._give_up(reading, EngineFailed(f"Reading the audio failed: {type(error).__name__}."))

    def _advance(self, reading: _Reading, thread: _Thread) -> None:
        """One stretch of this file, and the segments that it completes."""
        job = reading.job
        assert thread.readers is not None
        try:
            heard = reading.advance(thread.readers)
        except ReadersGone as gone:
            # From now on this thread reads here: slower, and nothing is lost.
            log("reading goes on in the worker", level="warning", error=str(gone))
            thread.readers = self._here
            heard = reading.advance(thread.readers)
        with job.lock:
            job.decode_ns += heard.decode_ns
            job.vad_ns += heard.vad_ns
            job.pending.extend(heard.segments)
            job.exhausted = heard.over
            job.duration_samples = heard.samples
        if heard.over:
            reading.close()
        if heard.segments or heard.over:
            self._bell.ring()

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
