"""Lanes, with the embedded model: who waits for a short answer does not wait for somebody's long file."""

from __future__ import annotations

import concurrent.futures
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process.fakes import GUARD, running
from tests.server import Server, serving
from tests.speech import DATA, recital, wav, word_errors, words

SHORT = DATA / "librivox-0880.wav"
LONGEST_STEP = DATA / "jfk.wav"
"""Eleven seconds, so at least one segment is as long as segments get."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def long_file(folder: Path, repeats: int) -> tuple[Path, str]:
    """A batch job, and what is said in it."""
    audio, said = recital(repeats, [0.4, 0.9, 1.4])
    path = folder / "long.wav"
    path.write_bytes(wav(audio))
    assert path.stat().st_size > 1_200_000, "it must be too large for the interactive lane"
    return path, said


def timed(server: Server, path: Path) -> float:
    """Seconds that a transcription takes."""
    began = time.monotonic()
    answer = server.transcribe(path)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"]
    return time.monotonic() - began


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


@pytest.mark.timeout(180)
def test_short_requests_pass_a_long_file(server: Server, tmp_path: Path) -> None:
    path, said = long_file(tmp_path, 2)
    timed(server, SHORT)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        batch: concurrent.futures.Future[httpx.Response] = pool.submit(server.transcribe, path)
        server.until(lambda: running(server) == 1, "the long one runs")
        for _ in range(3):
            timed(server, SHORT)
            assert not batch.done(), "a short request waited for the long file"
        server.until(lambda: server.worker["preemptions"] > 0, "preemptions are counted")
        answer = batch.result()
    assert answer.status_code == 200
    assert word_errors(said, answer.json()["text"]) <= 0.06 * len(words(said))


def test_streams_pass_a_long_file_too(server: Server, tmp_path: Path) -> None:
    path, _ = long_file(tmp_path, 1)
    timed(server, SHORT)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        batch = pool.submit(server.transcribe, path)
        server.until(lambda: running(server) == 1, "the long one runs")
        answer = server.transcribe(SHORT, stream="true")
        assert "transcript.text.done" in answer.text
        assert not batch.done()
        server.http.delete("/api/ps/whisper-1", params={"force": "1"})
        refused = batch.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_unavailable")
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_probes_while_half_an_hour_is_transcribed(server: Server, tmp_path: Path) -> None:
    path, _ = long_file(tmp_path, 46)
    timed(server, SHORT)
    idle = p95([timed(server, SHORT) for _ in range(30)])
    step = max(_engine_seconds(server.transcribe(LONGEST_STEP)) for _ in range(3))
    chance = random.Random(5)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        batch = pool.submit(server.transcribe, path)
        server.until(lambda: running(server) == 1, "the long one runs")
        took = []
        for _ in range(30):
            time.sleep(chance.uniform(0, 0.5))
            took.append(timed(server, SHORT))
            assert not batch.done(), "the long file is too short for thirty probes"
        server.until(lambda: server.worker["preemptions"] > 0, "preemptions are counted")
        server.http.delete("/api/ps/whisper-1", params={"force": "1"})
        batch.result()
    print(f"p95 idle {idle:.3f} s, beside the file {p95(took):.3f} s, longest step {step:.3f} s")
    assert p95(took) <= GUARD * (1.5 * idle + step)


def _engine_seconds(answer: httpx.Response) -> float:
    (ms,) = re.findall(r"engine;dur=([\d.]+)", answer.headers["server-timing"])
    return float(ms) / 1e3
