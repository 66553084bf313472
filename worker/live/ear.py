"""What the ears know of one live stream: its decoder, audio that waits for the VAD, its endpointer, what is owed and acknowledged."""

from __future__ import annotations

import bisect
import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.errors import AudioOverrun
from shared.messages import RawAudio
from shared.pcm import SAMPLE_RATE
from worker.audio.samples import Audio
from worker.audio.vad import VadState
from worker.live.decode import LiveDecoder, live_decoder
from worker.live.endpointing import Endpointer
from worker.live.playout import Playout

PROGRESS_SECONDS = 0.25
"""Audio taken between two acknowledgements; the gateway keeps two seconds in flight."""
PROGRESS_BYTES = 32_768
"""The same in bytes: a container may begin with a picture, and give no audio for a long time."""
MAX_PENDING_SAMPLES = 900 * SAMPLE_RATE
"""Decoded and not listened to. What is on its way of a container (384 KB) is less than that, unless somebody compresses silence to bring
the server down: a second of it takes 160 bytes as FLAC."""
ARRIVALS = 2048
"""Remembered arrival times of a stream: 40 s of 20 ms frames."""


@dataclass(slots=True)
class Ear:
    """One stream. Belongs to the thread of ``worker.live.audio``."""

    request_id: str
    audio: RawAudio
    """What ``decoder`` decodes."""
    decoder: LiveDecoder
    endpointer: Endpointer
    decoded: int
    """End of the decoded audio, samples of the stream."""
    acknowledged: int
    """Samples decoded at the last acknowledgement."""
    received_bytes: int = 0
    acknowledged_bytes: int = 0
    state: VadState = field(default_factory=VadState)
    pending: Audio = field(default_factory=lambda: np.zeros(0, np.float32))
    """Less than a frame of it is left when nothing is to be done."""
    arrivals: collections.deque[tuple[int, int]] = field(default_factory=lambda: collections.deque(maxlen=ARRIVALS))
    """(end of a piece, samples; when it came, ns)."""
    owed: collections.deque[tuple[int, int]] = field(default_factory=collections.deque)
    """(utterance, its first sample) of those that have begun and have no final yet."""
    vad_ns: int = 0
    playout: Playout = field(default_factory=Playout)

    # ------------------------------------------------------------ audio

    def hear(self, data: bytes, arrived_ns: int) -> None:
        """Bytes as they were received. Raises what the decoder raises."""
        audio = self.decoder.decode(data)
        self.received_bytes += len(data)
        self._keep(audio, arrived_ns)

    def fetch(self) -> None:
        """What a decoder with a thread of its own has finished since its bytes came. Raises what the decoder raises."""
        self._keep_late(self.decoder.decode(b""))

    def settle(self) -> None:
        """All audio of the bytes so far. Raises what the decoder raises."""
        self._keep_late(self.decoder.settle())

    def flush(self) -> None:
        """No more bytes will come."""
        self._keep_late(self.decoder.flush())

    def decode_as(self, audio: RawAudio, wake: Callable[[], None]) -> None:
        """Another encoding, before the first byte."""
        self.decoder.close()
        self.audio, self.decoder = audio, live_decoder(audio, wake)

    def clear(self) -> int:
        """Forget the open utterance and all audio so far; returns the utterance's number, -1 if there was none."""
        self.endpointer.position += len(self.pending)
        self.pending = self.pending[:0]
        return self.endpointer.clear()

    def _keep_late(self, audio: Audio) -> None:
        if len(audio):
            self._keep(audio, self.arrivals[-1][1] if self.arrivals else time.monotonic_ns())

    def _keep(self, audio: Audio, arrived_ns: int) -> None:
        self.decoded += len(audio)
        self.playout.add(len(audio), time.monotonic_ns())
        self.arrivals.append((self.decoded, arrived_ns))
        self.pending = np.concatenate((self.pending, audio)) if len(self.pending) else audio
        if len(self.pending) > MAX_PENDING_SAMPLES:
            raise AudioOverrun(
                f"{len(self.pending) / SAMPLE_RATE:.0f} s of audio came at once.", hint="Send no faster than real time."
            )

    # ------------------------------------------------------------ moments

    @property
    def stalls_at_ns(self) -> int:
        """When the open utterance ends if nothing comes; 0 if none is open, or only the client ends it."""
        waits = self.endpointer.unfinished and self.endpointer.rules.automatic
        return self.playout.stalled_from_ns if waits else 0

    def arrived_ns(self, sample: int) -> int:
        """When this sample was received; 0 if nothing was."""
        index = bisect.bisect_left(self.arrivals, (sample, 0))
        return self.arrivals[min(index, len(self.arrivals) - 1)][1] if self.arrivals else 0

    @property
    def needed_sample(self) -> int:
        """The oldest sample that a resume would need."""
        return self.owed[0][1] if self.owed else self.endpointer.needed_sample

    def acknowledge(self) -> bool:
        """Whether it is time to say how far the stream is; the moment is taken down."""
        seconds = (self.decoded - self.acknowledged) / SAMPLE_RATE
        if seconds < PROGRESS_SECONDS and self.received_bytes - self.acknowledged_bytes < PROGRESS_BYTES:
            return False
        self.acknowledged, self.acknowledged_bytes = self.decoded, self.received_bytes
        return True
