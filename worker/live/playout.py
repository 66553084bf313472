"""When a live stream has run dry: the clock of a listener who plays what comes, at the pace of speech.

The end of speech is counted in audio. A client that gates its microphone, or whose line is dead, sends no silence, and the
utterance would stay open for as long as the socket does. The time since the last frame says little: a browser's recorder sends
five seconds at once and then nothing for as long. So what counts is when the audio would have been played to its end.
"""

from __future__ import annotations

from shared.pcm import SAMPLE_RATE

STALL_NS = 3_000_000_000
"""A stream that has been dry for so long sends nothing; networks stall for less."""
LEAD_NS = 10_000_000_000
"""Audio that comes faster than it is spoken is no reason to wait longer than this for more."""


class Playout:
    """Times in ns of one clock, which goes forward."""

    def __init__(self) -> None:
        self._dry_ns = 0

    def add(self, samples: int, now_ns: int) -> None:
        """Audio at 16 kHz has come."""
        end = max(self._dry_ns, now_ns) + samples * 1_000_000_000 // SAMPLE_RATE
        self._dry_ns = min(end, now_ns + LEAD_NS)

    def expect_until(self, ns: int) -> None:
        """It is not the stream that stood still: it stalls at this time at the earliest."""
        self._dry_ns = max(self._dry_ns, ns - STALL_NS)

    @property
    def stalled_from_ns(self) -> int:
        """From when on nobody needs to expect more, should nothing come."""
        return self._dry_ns + STALL_NS
