"""Where the time between the end of speech and the final went: on every final, and as a log of one JSON line each.

``NAPSCRIBE_LATENCY_LOG`` names the file; ``napscribe latency FILE`` sums it up. No text and no key is ever written to it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shared.journal import log
from shared.pcm import seconds
from shared.streams import UtteranceFinal, UtteranceTimings

STAGES = (
    "speech_end_to_final",
    "endpoint",
    "buffered",
    "queue",
    "vad",
    "engine",
    "encode",
    "prefill",
    "decode",
)
"""In the order of the report. The first is the sum that a caller feels; ``endpoint`` is the silence he asked for."""
PERCENTILES = (50, 90, 99)
MAX_WAITING = 10_000
"""Lines that a disk may be behind; further ones are dropped and counted."""


def stages_ms(timings: UtteranceTimings, now_ns: int) -> dict[str, float | None]:
    """Milliseconds of each of ``STAGES``; ``now_ns`` (CLOCK_MONOTONIC) is when the final leaves.

    ``speech_end_to_final`` is None where no frame of speech was seen, as in an utterance resumed at its very end.
    """
    total = round((now_ns - timings.speech_end_ns) / 1e6, 2) if timings.speech_end_ns else None
    rest = {name: round(getattr(timings, f"{name}_ns") / 1e6, 2) for name in STAGES[1:]}
    return {"speech_end_to_final": total, **rest}


class LatencyLog:
    """Appends to a file from a thread of its own: the loop never waits for a disk.

    Raises OSError if the file cannot be opened. A disk that fails later costs lines, never a transcript.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._encode = msgspec.json.Encoder().encode
        self.lost = 0
        """Lines that are not in the file."""
        self._thread = threading.Thread(target=self._run, name="latency-log", daemon=True)
        self._thread.start()

    def utterance(self, final: UtteranceFinal) -> None:
        """A final has come from the worker, now."""
        if self._lines.qsize() >= MAX_WAITING:
            self.lost += 1
            return
        line = {
            "time": round(time.time(), 3),
            "request_id": final.request_id,
            "utterance": final.utterance,
            "cause": final.cause,
            "finish_reason": final.finish_reason,
            "audio_ms": round(seconds(final.end_sample - final.start_sample) * 1e3),
            "windows": final.timings.windows,
            "windows_listening": final.timings.windows_listening,
            "revised": round(final.revised, 3),
            **{f"{name}_ms": ms for name, ms in stages_ms(final.timings, time.monotonic_ns()).items()},
        }
        self._lines.put(self._encode(line) + b"\n")

    def close(self) -> None:
        """Write what waits and close the file. Blocks: not for the loop."""
        self._lines.put(None)
        self._thread.join()
        self._file.close()
        if self.lost:
            log("latency log", level="warning", lost=self.lost)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
            except OSError as error:
                if not self.lost:
                    log("latency log", level="warning", error=str(error))
                self.lost += 1


class Row(msgspec.Struct, frozen=True):
    """One stage over all utterances that have it: milliseconds at each of ``PERCENTILES``."""

    stage: str
    count: int
    ms: tuple[float, ...]


def summary(lines: Iterable[bytes | str]) -> tuple[list[Row], int]:
    """Stages in the order of ``STAGES``, those without a value left out, and how many lines were none of ours."""
    values: dict[str, list[float]] = {name: [] for name in STAGES}
    foreign = 0
    for line in lines:
        entry = _entry(line)
        if entry is None:
            foreign += bool(line.strip())
            continue
        for name in STAGES:
            value = entry.get(f"{name}_ms")
            if isinstance(value, int | float):
                values[name].append(value)
    rows = [Row(name, len(found), percentiles(found)) for name, found in values.items() if found]
    return rows, foreign


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """The smallest value that so many percent do not exceed (nearest rank), for each of ``PERCENTILES``."""
    ordered = sorted(values)
    return tuple(ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in PERCENTILES)


def _entry(line: bytes | str) -> dict[str, object] | None:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return entry if isinstance(entry, dict) and "speech_end_to_final_ms" in entry else None
