"""Processes that die, hang or are poisoned, under a real server: nothing said is lost, nothing stays behind."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.process.conftest import alive
from tests.process.fakes import FAKE, GUARD, recording, running, segments_text, uploads
from tests.server import Server, events_of, serving
from tests.speech import recital, wav

pytestmark = pytest.mark.timeout(300)

SHARES = (0.2, 0.5, 0.8)
"""How much of a file is done when its worker is killed."""
GONE_SECONDS = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(debug_timing=1) as running:
        yield running


@pytest.fixture(scope="module", params=[1, pytest.param(5, marks=[pytest.mark.slow])])
def speech(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 s and 3 minutes of speech, pauses not counted."""
    audio, _ = recital(request.param, [0.4, 0.9, 1.4])
    path = tmp_path_factory.mktemp("speech") / "recital.wav"
    path.write_bytes(wav(audio))
    return path


def kill(server: Server) -> int:
    """SIGKILL to the worker, whichever it is now; its pid."""
    server.until(lambda: server.worker["state"] == "ready", "a worker to kill")
    pid = server.worker_pid()
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.worker["pid"] != pid, "the kill was seen")
    return pid


def steps(server: Server) -> int:
    """Steps of all its workers so far, by the journal: pings would tell of them a second later."""
    return server.log().count('"event":"step"')


def stream(server: Server, path: Path, kill_at: Sequence[int] = ()) -> list[str]:
    """Frames of a streamed transcript but its comments; the worker is killed whenever so many letters have come."""
    frames: list[str] = []
    left = list(kill_at)
    with (
        path.open("rb") as file,
        server.http.stream("POST", "/v1/audio/transcriptions/stream", files={"file": file}) as answer,
    ):
        assert answer.status_code == 200
        for frame in _frames(answer.iter_text()):
            if frame.startswith(":"):
                continue
            frames.append(frame)
            if left and letters_in(frames) >= left[0]:
                left.pop(0)
                kill(server)
    assert not left, "the stream was over before every kill"
    return frames


def _frames(pieces: Iterator[str]) -> Iterator[str]:
    """What stands between blank lines, as soon as it is there."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n\n")
        yield from whole
    assert not rest, "cut off"


def letters_in(frames: list[str]) -> int:
    return sum(len(event.get("delta", "")) for event in events_of("\n".join(frames)))


def shares_of(frames: list[str]) -> list[int]:
    """Numbers of letters at which to kill."""
    return [round(share * letters_in(frames)) for share in SHARES]


def text_of(frames: list[str]) -> str:
    """Text of the stream's done event, which is the sum of its deltas."""
    *deltas, done = events_of("\n".join(frames))
    assert "".join(event["delta"] for event in deltas) == done["text"]
    text: str = done["text"]
    return text


# ---------------------------------------------------------------- the worker is killed under a file


@pytest.fixture(scope="module")
def unkilled(server: Server, speech: Path) -> list[str]:
    """Frames of a run without accidents."""
    return stream(server, speech)


def test_a_stream_has_the_same_bytes_after_three_kills(server: Server, speech: Path, unkilled: list[str]) -> None:
    before = server.worker["generation"]
    killed = stream(server, speech, shares_of(unkilled))
    assert killed == unkilled
    assert server.worker["generation"] == before + 3


def test_a_whole_answer_is_the_same_after_kills(server: Server, tmp_path: Path) -> None:
    """Of so many segments that some are left whenever the second kill comes."""
    speech = tmp_path / "recital.wav"
    speech.write_bytes(wav(recital(5, [0.4, 0.9, 1.4])[0]))
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    whole = server.transcribe(speech, **fields)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = steps(server)
        answer = pool.submit(server.transcribe, speech, **fields)
        for _ in range(2):
            server.until(lambda: steps(server) >= before + 2, "it has moved on since the last kill")  # noqa: B023
            kill(server)
            before = steps(server)
        killed = answer.result(120)
    assert killed.json() == whole.json()
    assert killed.headers["x-worker-restarts"] == "2"
    assert int(killed.headers["x-redone-segments"]) <= 2 + 1, "one each, and one whose last words died with a worker"


def test_words_of_an_open_segment_are_not_said_twice(speech: Path) -> None:
    """An engine that streams words and takes a prefix is killed in the middle of its segments."""
    with serving(model="scripted:hears=clock,batch=2,step_ms=15,words=1,word_ms=160") as server:
        unkilled = stream(server, speech)
        assert len(unkilled) > 100, "it does not stream words"
        killed = stream(server, speech, shares_of(unkilled))
    assert text_of(killed) == text_of(unkilled)


# ---------------------------------------------------------------- hangs and poison


def test_a_hanging_worker_is_replaced(tmp_path: Path) -> None:
    """It answers pings and does nothing: only the age of its step tells."""
    with serving(worker=f"{FAKE} --stall-after 2 --until 1 --max-step-s 0.5") as server:
        answer = server.transcribe(recording(tmp_path, 4))
        assert answer.json()["text"] == segments_text(4)
        assert answer.headers["x-worker-restarts"] == "1"
        assert answer.headers["x-redone-segments"] == "1"
        assert server.worker["generation"] == 2


def test_poison_fails_alone(tmp_path: Path) -> None:
    """It comes in the midst of its neighbours' work, and they lose nothing by it."""
    long, short = recording(tmp_path, 1200), recording(tmp_path, 10)
    with serving(worker=f"{FAKE} --poison arsenic --segment-bytes 100000 --segment-s 0.1 --credits 6") as server:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            neighbours = [pool.submit(server.transcribe, long) for _ in range(3)]
            server.until(lambda: running(server) == 3, "they are at work")
            refused = pool.submit(server.transcribe, short, prompt="with arsenic").result(60).json()["error"]
            answers = [neighbour.result(60) for neighbour in neighbours]
        assert refused["code"] == "worker_crashed"
        assert "2 times" in refused["message"]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [answer.json()["text"] for answer in answers] == [segments_text(12)] * 3
        restarts = {answer.headers["x-worker-restarts"] for answer in answers}
        assert restarts == {"1"}, "the second time the suspect was alone"
        assert server.transcribe(short).json()["text"] == segments_text(1)


def test_a_sdk_is_told_not_to_send_poison_again(tmp_path: Path) -> None:
    with serving(worker=f"{FAKE} --poison arsenic") as server:
        answer = server.transcribe(recording(tmp_path, 3), prompt="with arsenic")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert "retry-after" not in answer.headers


# ---------------------------------------------------------------- the gateway is killed


def test_the_worker_dies_with_the_gateway_and_the_next_one_sweeps(tmp_path: Path) -> None:
    spool, runtime = tmp_path / "spool", Path(tempfile.mkdtemp(prefix="ns-", dir="/tmp"))  # socket paths are short
    fake = f"{FAKE} --segment-s 0.05 --ignore-term --ignore-stop"
    with (
        serving(worker=fake, spool_dir=spool, runtime_dir=runtime) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        caller = pool.submit(_lost, server, recording(tmp_path, 10_000))
        server.until(lambda: running(server) == 1, "running")
        worker = server.worker_pid()
        server.process.kill()
        server.until(lambda: not alive(worker), "no worker", GONE_SECONDS * GUARD)
        assert caller.result(10)
    assert uploads(spool)
    assert _files(runtime)
    with serving(worker=FAKE, spool_dir=spool, runtime_dir=runtime) as server:
        assert len(list(spool.iterdir())) == 1, "only the new gateway's own folder"
        assert len(list(runtime.iterdir())) == 1
        assert server.transcribe(recording(tmp_path, 2)).json()["text"] == segments_text(2)
    assert not _files(spool)
    assert not _files(runtime)


def _lost(server: Server, path: Path) -> bool:
    """Whether the connection broke."""
    try:
        server.transcribe(path)
    except httpx.TransportError:
        return True
    return False


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_the_embedded_worker_dies_with_the_gateway(speech: Path) -> None:
    """In a step of its native library, which holds no signal back."""
    with serving(debug_timing=1) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        caller = pool.submit(_lost, server, speech)
        server.until(lambda: steps(server) >= 1, "in its steps")
        worker = server.worker_pid()
        server.process.kill()
        server.until(lambda: not alive(worker), "no worker", GONE_SECONDS * GUARD)
        assert caller.result(10)
