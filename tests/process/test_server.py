"""A real ``napscribe serve``: what every answer carries, bounds, steering the worker, streams that break, the end."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process.conftest import alive
from tests.process.fakes import FAKE, recording, running, segments_text, uploads
from tests.server import Server, events_of, serving
from tests.speech import DATA, silence, wav

MODEL = "moonshine-tiny-en"
SHORT = DATA / "librivox-0880.wav"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Small bounds: 1 MiB an upload, 20 s of audio."""
    with serving(max_upload_mb=1, max_audio_seconds=20) as running:
        yield running


# ---------------------------------------------------------------- what every answer carries

STAGES = {"queue", "spawn", "decode", "vad", "engine", "total"}


def _timings(answer: httpx.Response) -> dict[str, float]:
    """``server-timing``, in milliseconds."""
    return {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/api/ps", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/no/such", 404),
        ("GET", "/no/such/door", 404),
        ("POST", "/api/ps/no/such", 404),
        ("GET", "/v1/audio/transcriptions", 405),
        ("GET", "/v1/stream", 426),
        ("GET", "/v1/realtime?intent=transcription", 426),
        ("POST", "/v1/audio/transcriptions", 400),
        ("POST", "/v1/audio/transcriptions/stream", 400),
        ("POST", "/v1/audio/translations", 501),
    ],
)
def test_every_answer_has_its_id_and_its_time(server: Server, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status, answer.text
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
    assert _timings(answer)["total"] >= 0
    if status >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}


def test_the_callers_id_is_kept_if_it_is_sane(server: Server) -> None:
    assert server.http.get("/health", headers={"x-request-id": "trace-17.a"}).headers["x-request-id"] == "trace-17.a"
    strange = server.http.get("/health", headers={"x-request-id": "x" * 65}).headers["x-request-id"]
    assert strange.startswith("req_")


def test_a_transcript_says_where_its_time_went(server: Server) -> None:
    answer = server.transcribe(SHORT)
    spent = _timings(answer)
    assert set(spent) == STAGES
    assert min(spent["decode"], spent["vad"], spent["engine"]) > 0
    assert spent["total"] >= spent["queue"] + spent["spawn"] + spent["engine"]
    assert "x-worker-restarts" not in answer.headers


def test_a_stream_has_its_id_and_the_stages_known_at_its_start(server: Server) -> None:
    answer = server.transcribe(SHORT, stream="true")
    assert answer.headers["x-request-id"].startswith("req_")
    assert {"queue", "spawn", "total"} <= set(_timings(answer))


def test_a_job_that_fails_says_where_its_time_went(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "notes.wav"
    path.write_bytes(b"no sound " * 300)
    answer = server.transcribe(path)
    assert answer.status_code == 415
    assert set(_timings(answer)) == STAGES


# ---------------------------------------------------------------- bounds


def test_too_many_bytes(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "large.wav"
    path.write_bytes(bytes(3 << 20))
    answer = server.transcribe(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "upload_too_large")
    assert not uploads(server.spool)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_too_many_seconds(server: Server, tmp_path: Path, stream: str) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(wav(silence(25)))
    answer = server.transcribe(path, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "audio_too_long")


# ---------------------------------------------------------------- steering the worker


def test_load_and_unload(server: Server) -> None:
    loaded = server.http.post(f"/api/ps/{MODEL}").json()
    assert loaded["status"] == "ready"
    assert alive(loaded["pid"])
    assert server.worker["state"] == "ready"
    assert server.http.delete("/api/ps/whisper-1").json() == {"status": "unloaded"}
    assert not alive(loaded["pid"])
    assert server.worker["state"] == "stopped"
    again = server.http.post(f"/api/ps/{MODEL}").json()
    assert again["generation"] == loaded["generation"] + 1
    assert server.http.delete(f"/api/ps/{MODEL}", params={"force": "1"}).json() == {"status": "unloaded"}
    assert not alive(again["pid"])


# ---------------------------------------------------------------- streams


def test_a_stream_tells_what_it_waits_for(tmp_path: Path) -> None:
    with serving(worker=f"{FAKE} --slow-load 7") as server, recording(tmp_path, 1).open("rb") as file:
        answer = server.http.post("/v1/audio/transcriptions/stream", files={"file": file})
    comment, *_ = answer.text.split("\n\n")
    assert re.fullmatch(r": starting: loading \d+%", comment)
    assert [event["type"] for event in events_of(answer.text)] == ["transcript.text.delta", "transcript.text.done"]


def test_an_error_in_midstream_is_an_event(tmp_path: Path) -> None:
    with serving(worker=f"{FAKE} --segment-s 0.4 --die-after 4") as server:
        answer = server.transcribe(recording(tmp_path, 8), stream="true")
    assert answer.status_code == 200
    *words, last = events_of(answer.text)
    heard = "".join(event["delta"] for event in words)
    assert heard in {segments_text(3), segments_text(4)}, "the last word may have died with the worker"
    assert last["error"]["code"] == "worker_crashed"
    assert "done" not in answer.text


# ---------------------------------------------------------------- the end

STOP_SECONDS = 6.0
"""Less than the time that answers get to leave: they are told to, not waited for."""


@pytest.mark.parametrize("stream", ["false", "true"])
def test_sigterm_during_a_job(tmp_path: Path, stream: str) -> None:
    """The caller is told, the worker is reaped, the spool is empty, the exit code is 0."""
    with serving(worker=f"{FAKE} --segment-s 0.05") as server:
        begun = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            caller = pool.submit(_first_and_last, server, recording(tmp_path, 10_000), stream, begun)
            server.until(lambda: running(server) == 1, "running")
            if stream == "true":
                assert begun.wait(10)
            worker = server.worker_pid()
            assert uploads(server.spool)
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < STOP_SECONDS
            status, body, retry_after = caller.result(10)
        assert status == (503 if stream == "false" else 200)
        assert '"shutting_down"' in body
        assert stream == "true" or int(retry_after) >= 1
        assert not alive(worker)
        assert not list(server.spool.iterdir())
        assert not list(server.folder.glob("napscribe-run-*"))


def _first_and_last(server: Server, path: Path, stream: str, begun: threading.Event) -> tuple[int, str, str]:
    """Send it, tell when the answer begins, read it whole: status, body, ``Retry-After``."""
    with (
        path.open("rb") as file,
        server.http.stream("POST", "/v1/audio/transcriptions", files={"file": file}, data={"stream": stream}) as answer,
    ):
        begun.set()
        return answer.status_code, answer.read().decode(), answer.headers.get("retry-after", "")


def test_sigterm_while_the_worker_starts(tmp_path: Path) -> None:
    with serving(worker=f"{FAKE} --slow-load 60") as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            caller = pool.submit(server.transcribe, recording(tmp_path, 3))
            server.until(lambda: server.worker["state"] == "starting" and server.worker["pid"] is not None, "spawned")
            worker = server.worker_pid()
            assert server.stop() == 0
            answer = caller.result(10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert not alive(worker)
