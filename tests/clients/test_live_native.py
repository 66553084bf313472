"""``WS /v1/stream`` with plain ``websockets`` and real speech at the pace of speech."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.clients.pace import at_real_time, mulaw, s16, speech_only
from tests.server import Server, serving
from tests.speech import DATA, clip, silence, word_errors, words

MODEL = "moonshine-tiny-en"
BYTES_PER_SECOND = 32_000
FIRST, SECOND = "librivox-0880", "librivox-0930"
PATIENCE_SECONDS = 30.0
"""Bounds a hang; the machine may be busy with other tests."""


class Talk:
    """A connection and all it has been told."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionClosedError):
            async for message in self.socket:
                self.events.append(json.loads(message))
                async with self._news:
                    self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th event of this type."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(lambda: len(self.of(kind)) >= count or self._reading.done())
        assert len(self.of(kind)) >= count, self.events
        return self.of(kind)[count - 1]

    async def control(self, kind: str) -> None:
        await self.socket.send(json.dumps({"type": kind}))

    async def say(self, audio: bytes, bytes_per_second: int = BYTES_PER_SECOND) -> None:
        await at_real_time(self.socket.send, audio, bytes_per_second)

    async def close(self) -> None:
        """Ask for the end and read to it."""
        await self.control("close")
        await self.over()

    async def over(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._reading

    @property
    def text(self) -> str:
        return " ".join(final["text"] for final in self.of("final"))


@asynccontextmanager
async def talking(server: Server, query: str = "", **how: Any) -> AsyncIterator[Talk]:
    url = f"ws://127.0.0.1:{server.port}/v1/stream?{query}"
    async with connect(url, compression=None, **how) as socket:
        yield Talk(socket)


def file_text(server: Server, name: str) -> str:
    """What the file door makes of the same clip."""
    text: str = server.transcribe(DATA / f"{name}.wav").json()["text"]
    return text


def tells_of(reference: str, hypothesis: str, tolerance: int = 2) -> None:
    assert word_errors(reference, hypothesis) <= tolerance, (reference, hypothesis)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    """Keys, two streams, and a worker that leaves at once."""
    with serving(model="scripted:live=2", api_keys="secret,other", idle_seconds=0.2) as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running


KEY: dict[str, Any] = {"additional_headers": {"Authorization": "Bearer secret"}}

# ---------------------------------------------------------------- speech


async def test_two_utterances_at_the_pace_of_speech(server: Server) -> None:
    """Partials while somebody speaks, deltas that are the final, times that go on."""
    audio = s16(np.concatenate([clip(FIRST), silence(0.9), clip(SECOND), silence(0.9)]))
    await asyncio.to_thread(server.http.post, f"/api/ps/{MODEL}")
    async with talking(server, "words=true&language=en") as talk:
        await talk.until("ready")
        await talk.say(audio)
        await talk.close()
        assert talk.socket.close_code == 1000
    for number, name in enumerate((FIRST, SECOND)):
        tells_of(await asyncio.to_thread(file_text, server, name), talk.of("final")[number]["text"])
    kinds = [event["type"] for event in talk.events]
    assert kinds[0] == "ready"
    assert kinds[-1] == "done"
    orders = [check_order([event for event in talk.events if event.get("utterance") == number]) for number in (0, 1)]
    assert any(orders), "nothing was shown while somebody spoke"
    check_times(talk)


def check_order(events: list[dict[str, Any]]) -> bool:
    """Of one utterance; returns whether a partial came while somebody spoke."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "speech_started"
    assert kinds[-1] == "final"
    assert kinds.count("speech_started") == kinds.count("speech_stopped") == kinds.count("final") == 1
    return "partial" in kinds[: kinds.index("speech_stopped")]


def check_times(talk: Talk) -> None:
    clock = 0.0
    for final in talk.of("final"):
        assert clock <= final["start"] < final["end"]
        clock = final["end"]
        spoken = final["words"]
        assert words(" ".join(word["word"] for word in spoken)) == words(final["text"])
        assert final["start"] <= spoken[0]["start"]
        assert all(word["start"] <= word["end"] for word in spoken)
        assert spoken[-1]["end"] <= final["end"] + 0.25
        timings = final["timings"]
        assert timings["endpoint"] > 0
        assert timings["speech_end_to_final"] >= timings["endpoint"]
    assert talk.of("done")[0]["duration"] >= clock


async def test_cold_start_keeps_the_first_word_and_the_tail(server: Server) -> None:
    """Somebody speaks before there is a worker, and hangs up with the last word."""
    server.http.delete(f"/api/ps/{MODEL}", params={"force": "1"})
    assert server.worker["state"] == "stopped"
    async with talking(server) as talk:
        await talk.say(s16(speech_only(clip(FIRST))))
        await talk.close()
    expected = words(await asyncio.to_thread(file_text, server, FIRST))
    heard = words(talk.text)
    assert heard[:2] == expected[:2]
    assert heard[-2:] == expected[-2:]
    assert talk.of("final")[-1]["cause"] == "close"


async def test_finalize_answers_now_and_the_stream_goes_on(server: Server) -> None:
    async with talking(server, "silence_ms=5000") as talk:
        await talk.control("finalize")
        assert (await talk.until("finalized"))["utterance"] is None
        await talk.say(s16(speech_only(clip(FIRST))))
        await talk.control("finalize")
        assert (await talk.until("finalized", 2))["utterance"] == 0
        first = talk.of("final")[0]
        assert first["cause"] == "request"
        await talk.socket.send(s16(speech_only(clip(SECOND))))
        await talk.close()
    tells_of(await asyncio.to_thread(file_text, server, FIRST), first["text"])
    tells_of(await asyncio.to_thread(file_text, server, SECOND), talk.of("final")[1]["text"])
    assert talk.of("final")[1]["start"] >= first["end"]


async def test_bulk_drains_without_pacing(server: Server) -> None:
    """Thirty seconds at once, and 40 kB in one message: slowed perhaps, never refused, nothing lost."""
    audio = np.concatenate([clip(name) for name in (FIRST, SECOND, FIRST) for _ in range(3)] + [silence(1.0)])
    data = s16(audio)
    async with talking(server, "interim=false") as talk:
        for start in range(0, len(data), 40_000):
            await talk.socket.send(data[start : start + 40_000])
        await talk.close()
    assert talk.of("partial") == []
    assert talk.of("done")[0]["duration"] == pytest.approx(len(audio) / 16_000, abs=0.01)
    expected = " ".join([FIRST] * 3 + [SECOND] * 3 + [FIRST] * 3)
    texts = {name: await asyncio.to_thread(file_text, server, name) for name in (FIRST, SECOND)}
    tells_of(" ".join(texts[name] for name in expected.split()), talk.text, tolerance=9)


async def test_a_telephone_line(server: Server) -> None:
    """Mu-law at 8 kHz in frames of 20 ms."""
    async with talking(server, "encoding=mulaw") as talk:
        await talk.say(mulaw(np.concatenate([clip(SECOND), silence(0.8)])), 8_000)
        await talk.close()
    tells_of(await asyncio.to_thread(file_text, server, SECOND), talk.text)


# ---------------------------------------------------------------- the line itself


async def test_rubbish_pings_and_clear_on_a_line_that_stays_up(scripted: Server) -> None:
    async with talking(scripted, **KEY) as talk:
        await talk.socket.send("hello?")
        await talk.socket.send('{"type": "dance"}')
        assert (await talk.until("error", 2))["code"] == "invalid_value"
        await talk.control("ping")
        await talk.until("pong")
        await (await talk.socket.ping())
        await talk.socket.send(s16(clip(FIRST)))
        await talk.control("clear")
        await talk.until("cleared")
        await talk.close()
        assert talk.of("final") == []
        assert talk.socket.close_code == 1000
        assert talk.socket.response is not None
        assert "sec-websocket-extensions" not in talk.socket.response.headers


async def test_asleep_until_somebody_speaks(scripted: Server) -> None:
    """An idle line holds no worker; closing it needs none; speech wakes it, and all of it is heard."""
    async with talking(scripted, **KEY) as idle, talking(scripted, **KEY) as talk:
        for line in (idle, talk):
            await line.socket.send(bytes(2 * 18_240))
        stopped = lambda: scripted.worker["state"] == "stopped"  # noqa: E731
        await asyncio.to_thread(scripted.until, stopped, "the worker has gone")
        generation = scripted.worker["generation"]
        await idle.control("finalize")
        assert (await idle.until("finalized"))["utterance"] is None
        await idle.close()
        assert idle.of("done")[0]["duration"] == 1.14
        assert scripted.worker["state"] == "stopped"
        await talk.socket.send(s16(clip(FIRST)))
        await talk.close()
    assert scripted.worker["generation"] > generation
    final = talk.of("final")[0]
    assert 1.0 <= final["start"] <= 1.5
    times = [int(word.removeprefix("s")) for word in talk.text.split()]
    assert times == list(range(times[0], times[-1] + 320, 320)), "a word for every 320 ms, none missing or twice"


# ---------------------------------------------------------------- the handshake


@pytest.mark.parametrize("path", ["/v1/stream", "/ws/transcribe", "/v1/listen?encoding=mulaw"])
@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_the_key_nobody_gets_in(scripted: Server, path: str, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://127.0.0.1:{scripted.port}{path}", additional_headers=headers)
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    assert key is None or key not in scripted.log()


@pytest.mark.parametrize("path", ["/v2/listen", "/v1/audio/transcriptions", "/"])
async def test_where_there_is_no_live_door_the_answer_says_so(scripted: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://127.0.0.1:{scripted.port}{path}")
    assert caught.value.response.status_code == 404
    assert "/v1/stream" in json.loads(caught.value.response.body or b"")["error"]["message"]


async def test_a_browser_brings_its_key_as_a_subprotocol(scripted: Server) -> None:
    how: dict[str, Any] = {"subprotocols": ["napscribe", "openai-insecure-api-key.other"]}
    async with talking(scripted, **how) as talk:
        await talk.until("ready")
        assert talk.socket.subprotocol == "napscribe"
        await talk.close()
    assert "openai-insecure" not in scripted.log()


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("encoding=mp3", 400, "invalid_value"),
        ("model=gpt-9", 404, "model_not_found"),
        ("words=x", 400, "invalid_value"),
    ],
)
async def test_a_bad_query_is_refused_with_its_reason(scripted: Server, query: str, status: int, code: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with talking(scripted, query, **KEY):
            pass
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == code


async def test_a_call_that_is_parked_keeps_its_seat(scripted: Server) -> None:
    """It is silent for so long that its worker may sleep; others come meanwhile, and are refused before they have begun."""
    await asyncio.to_thread(scripted.http.post, "/api/ps/scripted")
    async with talking(scripted, **KEY) as first, talking(scripted, **KEY) as second:
        for talk in (first, second):
            await talk.until("ready")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await asyncio.to_thread(scripted.http.get, "/api/ps")).json()["queue"]["live"]["parked"] < 2:
                await asyncio.sleep(0.1)
        with pytest.raises(InvalidStatus) as caught:
            async with talking(scripted, **KEY):
                pass
        assert caught.value.response.status_code == 429
        for talk in (first, second):
            await talk.socket.send(s16(clip(FIRST)))
            await talk.close()
            assert talk.of("final")
            assert not talk.of("error")


async def test_one_stream_too_many_is_refused_and_a_lost_line_makes_room(scripted: Server) -> None:
    await asyncio.to_thread(scripted.http.post, "/api/ps/scripted")
    async with talking(scripted, **KEY) as first, talking(scripted, **KEY):
        with pytest.raises(InvalidStatus) as caught:
            async with talking(scripted, **KEY):
                pass
        assert caught.value.response.status_code == 429
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.socket.transport.abort()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    async with talking(scripted, **KEY) as again:
                        await again.until("ready")
                    return
                except InvalidStatus:
                    await asyncio.sleep(0.02)  # the outside world: a lost socket has no event of ours


async def test_a_stream_that_is_refused_in_mid_call_ends_in_the_worker_too(scripted: Server) -> None:
    async with talking(scripted, **KEY) as talk:
        await talk.until("ready")
        await talk.socket.send(s16(clip(FIRST)))
        await talk.until("speech_started")
        pid = scripted.worker["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(1_200):
                await talk.control("finalize")
            error = await talk.until("error")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert error["code"] == "audio_overrun"
    async with talking(scripted, **KEY) as again:
        await again.until("ready")
        before = scripted.worker["steps"]
        await again.socket.send(s16(clip(FIRST)))
        await again.until("speech_started")

        def alone() -> bool:
            worker = scripted.worker  # as of a pulse that knows of the second call
            return bool(worker["steps"] > before and worker["working_on"]["live"] == 1)

        await asyncio.to_thread(scripted.until, alone, "the refused stream leaves the worker", 20)
        await again.close()
        assert again.of("final")


# ---------------------------------------------------------------- the latency log


def test_latency_of_every_utterance_is_logged_and_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "latency.jsonl"
    with serving(model="scripted", latency_log=path) as server:
        asyncio.run(_two_doors(server))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(entries) == 2
    for entry in entries:
        assert entry["speech_end_to_final_ms"] >= entry["endpoint_ms"] >= 0
        assert entry["audio_ms"] > 1000
        assert "text" not in entry
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "latency", str(path)], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][-3:] == ["p50", "p90", "p99"]
    assert lines[1][:2] == ["speech_end_to_final", "2"]
    assert float(lines[1][2]) <= float(lines[1][4])


async def _two_doors(server: Server) -> None:
    async with talking(server) as talk:
        await talk.socket.send(s16(clip(FIRST)))
        await talk.close()
    url = f"ws://127.0.0.1:{server.port}/v1/listen?encoding=linear16&sample_rate=16000"
    async with connect(url) as socket:
        await socket.send(s16(clip(FIRST)))
        await socket.send('{"type":"CloseStream"}')
        async for _ in socket:
            pass
