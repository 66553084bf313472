"""Short requests while a file of half an hour is being read: they may wait for one step of the engine, not for the file."""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.bench.figures import Figure, percentile
from tests.bench.stages import stages
from tests.server import ROOT, Server, serving
from tests.speech import recital, wav

CLIP = ROOT / "tests" / "data" / "librivox-0880.wav"
PROBES = 30
LONGEST_GAP_S = 1.5
FILE_SECONDS = 1800
SEGMENT_SECONDS = 10.0
"""The longest segment that the embedded engine takes; decoding one is its longest step."""
FACTOR = 1.5


def measure() -> Iterator[Figure]:
    moments = random.Random(2)
    with serving(script=True, idle_seconds=3600) as server, tempfile.TemporaryDirectory() as folder:
        server.transcribe(CLIP).raise_for_status()
        idle = [_probe(server) for _ in range(PROBES)]
        step = longest_step(server, Path(folder) / "segment.wav")

        reader = reading_half_an_hour(server, Path(folder) / "long.wav")
        busy = []
        for _ in range(PROBES):
            time.sleep(moments.uniform(0, LONGEST_GAP_S))
            busy.append(_probe(server))
        assert reader.is_alive(), "The file ended before the probes did."
        preemptions = server.worker["preemptions"]
    reader.join(30)
    idle_p95, busy_p95 = percentile(idle, 95), percentile(busy, 95)
    note = f"{FACTOR:g} x idle p95 of {idle_p95 * 1e3:.0f} ms + a step of {step * 1e3:.0f} ms"
    must = (FACTOR * idle_p95 + step) * 1e3
    aim = (idle_p95 + step) * 1e3
    yield Figure("3 s clip while a 30-minute file runs, p95", busy_p95 * 1e3, "ms", must, aim, note)
    yield Figure("preemptions of the file by those clips", preemptions, "", note=f"{PROBES} clips")


def _probe(server: Server) -> float:
    """Wall seconds of one interactive request."""
    began = time.perf_counter()
    server.transcribe(CLIP).raise_for_status()
    return time.perf_counter() - began


def longest_step(server: Server, path: Path) -> float:
    """Engine seconds of a full segment, on an idle server."""
    audio, _ = recital(1, (0,), trim=True)
    path.write_bytes(wav(audio[: round((SEGMENT_SECONDS - 0.5) * 16_000)]))
    answers = [server.transcribe(path, response_format="verbose_json").raise_for_status() for _ in range(5)]
    assert len(answers[0].json()["segments"]) == 1, answers[0].text
    return statistics.median(stages(answer)["engine"] for answer in answers) / 1e3


def reading_half_an_hour(server: Server, path: Path) -> threading.Thread:
    """A client whose long file, written to ``path``, is being transcribed from now on."""
    audio, _ = recital(FILE_SECONDS // 35, (0.4, 0.9))
    path.write_bytes(wav(audio[: FILE_SECONDS * 16_000]))
    steps = server.worker["steps"]
    reader = threading.Thread(target=_read, args=(server.url, path), daemon=True)
    reader.start()
    server.until(lambda: server.worker["steps"] > steps, "the file is being read")
    return reader


def _read(url: str, path: Path) -> None:
    """A client that wants a long file transcribed; in the end the server refuses it, since it stops."""
    with path.open("rb") as recording:
        httpx.post(f"{url}/v1/audio/transcriptions", files={"file": (path.name, recording)}, timeout=600)
