"""The audio of a live stream as it was sent, to mono float32 at 16 kHz, piece by piece, without clicks between pieces."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import av
import numpy as np
import soxr

from shared.errors import NapscribeError, UnsupportedAudio
from shared.messages import RawAudio
from shared.pcm import SAMPLE_RATE
from worker.audio.decode import PcmDecoder, decode_stream
from worker.audio.pcm import mono
from worker.audio.samples import Audio

CONTAINER = "container"
G729 = "g729"
SETTLE_SECONDS = 2.0
"""For a decoder to use up what it was given; it takes milliseconds."""
_EMPTY = np.zeros(0, np.float32)


class LiveDecoder(Protocol):
    def decode(self, data: bytes) -> Audio:
        """What these bytes complete; may be empty. Raises UnsupportedAudio."""
        ...

    def settle(self) -> Audio:
        """Everything that the bytes so far give, of which ``decode`` may have left some; more bytes may follow."""
        ...

    def flush(self) -> Audio:
        """The rest: no bytes follow."""
        ...

    def close(self) -> None: ...


class _Pieces(Protocol):
    def decode(self, data: bytes) -> Audio:
        """Float32 mono at the stream's own rate; bytes of an unfinished frame wait for the next piece."""
        ...


class G729Decoder:
    """Headerless G.729 (ITU-T G.729, annex A included): 10 bytes are 10 ms, 80 samples at 8 kHz.

    The shorter frames of annex B, comfort noise of a sender that is silent, cannot be told apart without the packets that they
    came in, so a stream that has them is not this encoding.
    """

    FRAME_BYTES, FRAME_SAMPLES, RATE = 10, 80, 8_000

    def __init__(self) -> None:
        codec: Any = av.CodecContext.create("g729", "r")
        codec.sample_rate = self.RATE
        codec.layout = "mono"
        self._codec = codec
        self._rest = b""

    def decode(self, data: bytes) -> Audio:
        data = self._rest + data
        whole = len(data) - len(data) % self.FRAME_BYTES
        self._rest = data[whole:]
        frames = [self._frame(data[start : start + self.FRAME_BYTES]) for start in range(0, whole, self.FRAME_BYTES)]
        return np.concatenate(frames) if frames else _EMPTY

    def _frame(self, frame: bytes) -> Audio:
        """Silence for one that cannot be decoded: what comes behind it stays at its time."""
        try:
            decoded = [np.frombuffer(out.planes[0], "<i2", out.samples) for out in self._codec.decode(av.Packet(frame))]
        except av.FFmpegError:
            decoded = []
        return mono([np.concatenate(decoded)]) if decoded else np.zeros(self.FRAME_SAMPLES, np.float32)


class PcmStream:
    """Headerless audio. The resampler keeps its state from piece to piece, so borders are inaudible."""

    def __init__(self, audio: RawAudio) -> None:
        self._pcm: _Pieces = G729Decoder() if audio.encoding == G729 else PcmDecoder(audio)
        self._resampler = (
            None
            if audio.sample_rate == SAMPLE_RATE
            else soxr.ResampleStream(audio.sample_rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        )

    def decode(self, data: bytes) -> Audio:
        return self._resample(self._pcm.decode(data), last=False)

    def settle(self) -> Audio:
        return _EMPTY

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

    def __init__(self, news: Callable[[], None]) -> None:
        """``news`` is called on that thread whenever there is something for ``decode`` or ``settle`` to fetch."""
        self._news = news
        self._file = _QueueFile()
        self._ended = False
        """The decoder's last word has been fetched: it said that there is no more, and nothing more will come."""
        self._output: queue.SimpleQueue[Audio | NapscribeError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="container", daemon=True)
        self._thread.start()

    def decode(self, data: bytes) -> Audio:
        if data:
            self._file.give(data)
        return self._taken(wait=False)

    def settle(self) -> Audio:
        self._file.wait_until_read(SETTLE_SECONDS)
        return self._taken(wait=False)

    def flush(self) -> Audio:
        self._file.give(b"")
        return self._taken(wait=True)

    def close(self) -> None:
        self._file.close()

    def _taken(self, *, wait: bool) -> Audio:
        parts: list[Audio] = []
        while not self._ended and (wait or not self._output.empty()):
            item = self._output.get()
            if item is None:
                self._ended = True
                break
            if isinstance(item, NapscribeError):
                raise item
            parts.append(item)
        return np.concatenate(parts) if parts else _EMPTY

    def _run(self) -> None:
        try:
            for audio in decode_stream(self._file):
                self._output.put(audio)
                self._news()
        except NapscribeError as error:
            self._output.put(error)
        except Exception as error:
            self._output.put(UnsupportedAudio(f"The stream cannot be decoded: {type(error).__name__}."))
        self._output.put(None)
        self._file.over()
        self._news()


class _QueueFile:
    """Pieces in a bounded queue, read as a file that cannot seek. One thread gives, another reads."""

    def __init__(self) -> None:
        self._pieces: queue.Queue[bytes] = queue.Queue(maxsize=256)
        self._closed = threading.Event()
        self._over = threading.Event()
        self._rest = b""
        self._given = 0
        self._asked = 0
        """Pieces that the reader has asked for: more than were given means that it has used up all of them."""
        self._asking = threading.Condition()

    def give(self, piece: bytes) -> None:
        """An empty one is the end. Waits while the reader is far behind; what comes after its own end is dropped."""
        self._given += 1
        if not self._over.is_set():
            self._pieces.put(piece)

    def wait_until_read(self, seconds: float) -> bool:
        """Return when the reader asks for more than it was given, or has ended; False if that takes longer."""
        with self._asking:
            return self._asking.wait_for(lambda: self._asked > self._given, seconds)

    def over(self) -> None:
        """The reader has ended and asks for nothing more. Whoever is just giving finds room."""
        self._over.set()
        with contextlib.suppress(queue.Empty):
            self._pieces.get_nowait()
        with self._asking:
            self._asked = sys.maxsize
            self._asking.notify_all()

    def close(self) -> None:
        """Nobody waits for anything any more."""
        self._closed.set()
        try:
            self._pieces.put_nowait(b"")
        except queue.Full:
            self._pieces.get_nowait()
            self._pieces.put_nowait(b"")

    def read(self, size: int) -> bytes:
        if not self._rest and not self._closed.is_set():
            with self._asking:
                self._asked += 1
                self._asking.notify_all()
            self._rest = self._pieces.get()
            if not self._rest:  # the end, which FFmpeg asks for more than once
                self._closed.set()
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def live_decoder(audio: RawAudio, news: Callable[[], None]) -> LiveDecoder:
    """``news``: audio can be fetched without further bytes. Raises UnsupportedAudio or BadRequest for an encoding or rate that
    cannot be."""
    return ContainerStream(news) if audio.encoding == CONTAINER else PcmStream(audio)
