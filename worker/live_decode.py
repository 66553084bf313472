"""The audio of a live stream as it was sent, to mono float32 at 16 kHz, piece by piece, without clicks between pieces."""

from __future__ import annotations

import queue
import threading
from typing import Protocol

import numpy as np
import soxr

from shared.errors import NapscribeError, UnsupportedAudio
from shared.messages import RawAudio
from shared.pcm import SAMPLE_RATE
from worker.decode import PcmDecoder, decode_stream
from worker.engines.base import Audio

CONTAINER = "container"
_EMPTY = np.zeros(0, np.float32)


class LiveDecoder(Protocol):
    def decode(self, data: bytes) -> Audio:
        """What these bytes complete; may be empty. Raises UnsupportedAudio."""
        ...

    def flush(self) -> Audio:
        """The rest: no bytes follow."""
        ...

    def close(self) -> None: ...


class PcmStream:
    """Headerless audio. The resampler keeps its state from piece to piece, so borders are inaudible."""

    def __init__(self, audio: RawAudio) -> None:
        self._pcm = PcmDecoder(audio)
        self._resampler = (
            None
            if audio.sample_rate == SAMPLE_RATE
            else soxr.ResampleStream(audio.sample_rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        )

    def decode(self, data: bytes) -> Audio:
        return self._resample(self._pcm.decode(data), last=False)

    def flush(self) -> Audio:
        return self._resample(_EMPTY, last=True)

    def close(self) -> None:
        """Nothing is held."""

    def _resample(self, audio: Audio, *, last: bool) -> Audio:
        if self._resampler is None:
            return audio
        resampled: Audio = self._resampler.resample_chunk(audio, last=last)
        return resampled


class ContainerStream:
    """webm, ogg and the like. FFmpeg pulls its input, so it runs in a thread of its own, fed through a bounded queue."""

    def __init__(self) -> None:
        self._input: queue.Queue[bytes] = queue.Queue(maxsize=256)
        self._output: queue.SimpleQueue[Audio | NapscribeError | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="container", daemon=True)
        self._thread.start()

    def decode(self, data: bytes) -> Audio:
        self._input.put(data)
        return self._taken(wait=False)

    def flush(self) -> Audio:
        self._input.put(b"")
        return self._taken(wait=True)

    def close(self) -> None:
        self._closed.set()
        try:
            self._input.put_nowait(b"")
        except queue.Full:
            self._input.get_nowait()
            self._input.put_nowait(b"")

    def _taken(self, *, wait: bool) -> Audio:
        parts: list[Audio] = []
        while wait or not self._output.empty():
            item = self._output.get()
            if item is None:
                break
            if isinstance(item, NapscribeError):
                raise item
            parts.append(item)
        return np.concatenate(parts) if parts else _EMPTY

    def _run(self) -> None:
        try:
            for audio in decode_stream(_QueueFile(self._input, self._closed)):
                self._output.put(audio)
        except NapscribeError as error:
            self._output.put(error)
        except Exception as error:
            self._output.put(UnsupportedAudio(f"The stream cannot be decoded: {type(error).__name__}."))
        self._output.put(None)


class _QueueFile:
    """A queue of pieces as a file that cannot seek."""

    def __init__(self, pieces: queue.Queue[bytes], closed: threading.Event) -> None:
        self._pieces = pieces
        self._closed = closed
        self._rest = b""

    def read(self, size: int) -> bytes:
        if not self._rest and not self._closed.is_set():
            self._rest = self._pieces.get()
            if not self._rest:  # the end, which FFmpeg asks for more than once
                self._closed.set()
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def live_decoder(audio: RawAudio) -> LiveDecoder:
    """Raises UnsupportedAudio or BadRequest for an encoding or rate that cannot be."""
    return ContainerStream() if audio.encoding == CONTAINER else PcmStream(audio)
