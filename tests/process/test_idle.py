"""The worker sleeps: it is gone when nobody needs it, it comes back for everybody, and asking about it never wakes it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.process.conftest import alive
from tests.process.fakes import FAKE, GUARD, recording, segments_text
from tests.server import Server, serving
from tests.speech import DATA

SHORT = DATA / "librivox-0880.wav"
IDLE_SECONDS = 2
GONE_SECONDS = 4
"""After the last answer, with an idle time of two seconds."""


def asleep(server: Server) -> None:
    """Wait until the worker has gone by itself."""
    server.until(lambda: server.worker["state"] == "stopped", "asleep")
    assert server.worker["reason"] == "idle"


def test_gone_soon_after_the_last_answer() -> None:
    with serving(idle_seconds=IDLE_SECONDS) as server:
        assert server.transcribe(SHORT).status_code == 200
        answered = time.monotonic()
        worker = server.worker_pid()
        server.until(lambda: not alive(worker), "gone", GONE_SECONDS * GUARD)
        assert time.monotonic() - answered >= IDLE_SECONDS * 0.9, "it left too soon"
        assert server.worker["resident_bytes"] == 0


def test_real_cycles_of_request_and_sleep() -> None:
    with serving(idle_seconds=0.2) as server:
        texts = set()
        for generation in (1, 2, 3):
            texts.add(server.transcribe(SHORT).json()["text"])
            assert server.worker["generation"] == generation
            asleep(server)
        assert len(texts) == 1


def test_twenty_cycles_of_request_and_sleep(tmp_path: Path) -> None:
    path = recording(tmp_path, 3)
    with serving(worker=FAKE, idle_seconds=0.05) as server:
        for generation in range(1, 21):
            answer = server.transcribe(path)
            assert (answer.status_code, answer.json().get("text")) == (200, segments_text(3)), answer.text
            assert server.worker["generation"] == generation
            asleep(server)


def test_requests_that_hit_the_moment_of_leaving(tmp_path: Path) -> None:
    """With an idle time of nothing, every request meets a worker that is about to go, is going, or is gone."""
    path = recording(tmp_path, 1)
    with serving(worker=FAKE, idle_seconds=0) as server:
        for pause in range(16):
            answer = server.transcribe(path)
            assert (answer.status_code, answer.json().get("text")) == (200, "w0"), answer.text
            time.sleep(pause % 8 * 0.005)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_long_request_is_not_cut(tmp_path: Path, stream: str) -> None:
    with serving(worker=f"{FAKE} --segment-s 0.5", idle_seconds=0.2) as server:
        answer = server.transcribe(recording(tmp_path, 6), stream=stream)
        assert segments_text(6) in answer.text
        assert server.worker["generation"] == 1
        asleep(server)


@pytest.mark.slow
def test_ten_seconds_of_work_with_an_idle_time_of_two(tmp_path: Path) -> None:
    with serving(worker=f"{FAKE} --segment-s 2.5", idle_seconds=IDLE_SECONDS) as server:
        answer = server.transcribe(recording(tmp_path, 4))
        assert answer.json()["text"] == segments_text(4)
        assert server.worker["generation"] == 1


DOORS = ("/health", "/ready", "/api/ps", "/v1/models", "/v1/models/whisper-1", "/no/such/door")


def test_asking_never_wakes_the_worker() -> None:
    with serving(worker=FAKE) as server:
        for _ in range(20):
            for door in DOORS:
                server.http.get(door)
        server.http.post("/v1/audio/transcriptions", files={"file": ("empty.wav", b"")})
        server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x" * 99)}, data={"model": "no-such"})
        server.http.post("/v1/audio/translations", files={"file": ("a.wav", b"x" * 99)})
        for fields in ({"language": "de"}, {"languages[]": "de"}):  # the model's name tells what it knows
            answer = server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x" * 99)}, data=fields)
            assert answer.status_code == 400
        worker = server.worker
        assert (worker["state"], worker["generation"], worker["pid"]) == ("stopped", 0, None)
        assert "starting" not in server.log()


def test_asking_does_not_keep_the_worker_awake(tmp_path: Path) -> None:
    with serving(worker=FAKE, idle_seconds=0.5) as server:
        server.transcribe(recording(tmp_path, 1))

        def gone() -> bool:
            assert all(server.http.get(door).status_code in {200, 404} for door in DOORS)
            return bool(server.worker["state"] == "stopped")

        server.until(gone, "asleep in spite of pollers", GONE_SECONDS * GUARD)
        assert server.worker["generation"] == 1


def test_an_answer_that_is_still_read_keeps_the_worker(tmp_path: Path) -> None:
    """A lease lasts until the last byte: a slow reader of a stream does not meet a second worker."""
    with serving(worker=f"{FAKE} --segment-s 0.3", idle_seconds=0.1) as server:
        with (
            recording(tmp_path, 4).open("rb") as file,
            server.http.stream("POST", "/v1/audio/transcriptions/stream", files={"file": file}) as answer,
        ):
            assert server.worker["leases"] == 1
            assert segments_text(4) in answer.read().decode()
        asleep(server)
        assert server.worker["generation"] == 1
