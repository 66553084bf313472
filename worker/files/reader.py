"""One file being read: decoded, listened to and cut into segments, a stretch at a time.

``FileReader`` does it here. ``worker.files.reader_process`` does the same in a process of its own; the audio threads do not see
which.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.messages import TranscribeFile
from shared.pcm import seconds
from worker.audio.decode import AudioFile
from worker.audio.samples import Audio
from worker.audio.vad import SileroVad
from worker.files.segments import Segment, Segmenter, SegmentPolicy


@dataclass(frozen=True, slots=True)
class Heard:
    """What one stretch of a file gave."""

    segments: list[Segment]
    samples: int
    """Decoded so far, 16 kHz, from the start of the recording."""
    over: bool
    """The file has ended, or the part of it that was asked for; the last segments are here."""
    decode_ns: int
    vad_ns: int


class ReadersGone(Exception):  # it says what is the case
    """There is nothing to read with any more."""


class Reader(Protocol):
    """An open file. Used by one thread."""

    def advance(self) -> Heard:
        """The next stretch. Raises what ``AudioFile`` raises, WorkerCrashed, EngineFailed, ReadersGone."""
        ...

    def close(self) -> None: ...


class Readers(Protocol):
    """Opens files; each audio thread has one for itself."""

    def open(self, command: TranscribeFile) -> Reader:
        """Raises what ``AudioFile`` raises, and ReadersGone."""
        ...


class FileReader:
    """A second of sound at a time, in this process."""

    def __init__(self, vad: SileroVad, policy: SegmentPolicy, command: TranscribeFile) -> None:
        options = command.options
        self._clip_s = options.clip_seconds
        self._segmenter = Segmenter(vad, policy, base_sample=command.base_sample, next_index=command.next_index)
        self._file = AudioFile(
            Path(command.path), raw=options.raw, max_seconds=options.max_seconds, base_sample=command.base_sample
        ).__enter__()
        self._chunks: Iterator[Audio] = iter(self._file)

    def advance(self) -> Heard:
        began = time.monotonic_ns()
        clipped = self._clip_s and seconds(self._file.samples) >= self._clip_s
        chunk = None if clipped else next(self._chunks, None)
        decoded = time.monotonic_ns()
        segments = self._segmenter.flush() if chunk is None else self._segmenter.push(chunk)
        vad_ns = time.monotonic_ns() - decoded
        return Heard(segments, self._file.samples, chunk is None, decoded - began, vad_ns)

    def close(self) -> None:
        self._file.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class FileReaders:
    """``Readers`` of this process."""

    vad: SileroVad
    policy: SegmentPolicy

    def open(self, command: TranscribeFile) -> FileReader:
        return FileReader(self.vad, self.policy, command)
