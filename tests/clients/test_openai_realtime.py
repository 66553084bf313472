"""OpenAI Realtime against a real server: the ``openai`` SDK, GA and beta, and plain WebSockets as agents and browsers use them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, AuthenticationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from tests.server import Server, serving
from tests.speech import DATA, NAMES, clip, encode, resample, silence, transcripts, word_errors

KEY = "a-key-of-the-operator"
SHORT = "librivox-0880"
QUICK = ("librivox-0870", "librivox-0930", "jfk")
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
COMMITTED = "input_audio_buffer.committed"
LOGPROBS = "item.input_audio_transcription.logprobs"
MODEL = "moonshine-tiny-en"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with serving(api_keys=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with serving(model="scripted") as running:
        yield running


@cache
def pcm(name: str, rate: int, pause: float = 0.8) -> bytes:
    """A clip as 16-bit PCM, with some silence behind it."""
    audio = np.concatenate([clip(name), silence(pause)])
    audio = audio if rate == 16_000 else resample(audio, rate)
    return bytes((audio.clip(-1, 1) * 32767).astype("<i2").tobytes())


def pieces(data: bytes, size: int) -> list[str]:
    return [base64.b64encode(data[at : at + size]).decode() for at in range(0, len(data), size)]


@cache
def heard_by_file(server: Server, name: str) -> int:
    """Word errors of the door for files."""
    answer = server.transcribe(DATA / f"{name}.wav")
    return word_errors(transcripts()[name], answer.json()["text"])


def sdk(server: Server, key: str = "unused") -> AsyncOpenAI:
    address = f"127.0.0.1:{server.port}/v1"
    return AsyncOpenAI(base_url=f"http://{address}", websocket_base_url=f"ws://{address}", api_key=key, max_retries=0)


async def collect(connection: Any, items: int = 10**6) -> list[Any]:
    """Events until so many items are completed, or an empty one is: the answer to a commit of nothing."""
    events: list[Any] = []
    async for event in connection:
        events.append(event)
        assert event.type != "error", event
        if event.type == COMPLETED:
            items -= 1
            if not items or not event.transcript:
                return events
    raise AssertionError("the server hung up")


def transcript(events: list[Any]) -> str:
    return " ".join(event.transcript for event in events if event.type == COMPLETED)


def check_items(events: list[Any]) -> None:
    """Each item: deltas, then its completion, behind its commit; the deltas begin the transcript or are revised by it."""
    for committed in (event for event in events if event.type == COMMITTED):
        of_item = [event for event in events if getattr(event, "item_id", None) == committed.item_id]
        assert of_item[-1].type == COMPLETED
        assert of_item[-1].usage.type == "duration"
        assert of_item[-1].usage.seconds >= 0
        deltas = "".join(event.delta for event in of_item if event.type == DELTA)
        assert not deltas.startswith(" ")


# ---------------------------------------------------------------- the SDK, GA


@pytest.mark.parametrize("name", [SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)])
async def test_turns_of_the_server_at_the_pace_of_speech(server: Server, name: str) -> None:
    async with sdk(server) as client, client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        created = await connection.recv()
        assert created.type == "session.created"
        assert created.session.type == "transcription"
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 600},
                    }
                },
            }
        )

        async def speak() -> None:
            for piece in pieces(pcm(name, 24_000), 2_400):  # 50 ms
                await connection.input_audio_buffer.append(audio=piece)
                await asyncio.sleep(0.05)

            await connection.input_audio_buffer.commit()

        speaking = asyncio.ensure_future(speak())
        events = await collect(connection)
        await speaking
    of_first = [event for event in events if getattr(event, "item_id", None) == events[1].item_id]
    assert [event.type for event in [*events[:1], *of_first] if event.type != DELTA] == [
        "session.updated",
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        COMMITTED,
        COMPLETED,
    ]
    check_items(events)
    assert word_errors(transcripts()[name], transcript(events)) <= heard_by_file(server, name) + 2


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:4])])
async def test_words_of_every_clip(server: Server, name: str) -> None:
    async with sdk(server) as client, client.realtime.connect(model=MODEL) as connection:
        for piece in pieces(pcm(name, 24_000), 4_800):
            await connection.input_audio_buffer.append(audio=piece)
        await connection.input_audio_buffer.commit()
        events = await collect(connection)
    check_items(events)
    assert word_errors(transcripts()[name], transcript(events)) <= heard_by_file(server, name) + 2


async def test_a_client_that_commits_gets_one_item_a_commit(server: Server) -> None:
    async with sdk(server) as client, client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
        session: Any = {"type": "transcription", "audio": {"input": audio_input}}  # OpenAI itself takes 24 kHz only
        await connection.session.update(session=session)
        for name in ("jfk", SHORT):
            for piece in pieces(pcm(name, 16_000, pause=0.0), 3_200):
                await connection.input_audio_buffer.append(audio=piece)
            await connection.input_audio_buffer.commit()
        events = await collect(connection, items=2)
    check_items(events)
    first, second = [event.transcript for event in events if event.type == COMPLETED]
    assert word_errors(transcripts()["jfk"], first) <= heard_by_file(server, "jfk") + 2
    assert word_errors(transcripts()[SHORT], second) <= heard_by_file(server, SHORT) + 2
    assert not [event for event in events if "speech_" in event.type]


async def test_commits_and_clears_of_nothing_are_no_errors(server: Server) -> None:
    async with sdk(server) as client, client.realtime.connect() as connection:
        await connection.input_audio_buffer.clear()
        await connection.input_audio_buffer.commit()
        await collect(connection, items=1)
        await connection.input_audio_buffer.append(audio=base64.b64encode(bytes(48_000)).decode())
        await connection.input_audio_buffer.clear()
        for _ in range(2):
            await connection.input_audio_buffer.commit()
            events = await collect(connection, items=1)
            assert transcript(events) == ""
        await connection.input_audio_buffer.append(audio="not base64")
        mistake = await connection.recv()
        assert mistake.type == "error"
        assert (mistake.error.code, mistake.error.param) == ("invalid_value", "audio")


# ---------------------------------------------------------------- every word, once: the scripted engine names them by place


def spoken(seconds: float) -> list[str]:
    """Words of the scripted engine in speech of this length; it has one for every 320 ms, first and last may be silent."""
    return [f"s{at:06d}" for at in range(0, int(seconds * 1000), 320)]


async def dictate(server: Server, detection: dict[str, Any] | None, *, pause: float) -> list[Any]:
    """A long clip at four times the pace of speech, and the commit."""
    async with sdk(server) as client, client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": detection}
        session: Any = {"type": "transcription", "audio": {"input": audio_input}, "include": [LOGPROBS]}
        await connection.session.update(session=session)

        async def speak() -> None:
            for piece in pieces(pcm("jfk", 16_000, pause=pause), 3_200):  # 100 ms
                await connection.input_audio_buffer.append(audio=piece)
                await asyncio.sleep(0.025)
            await connection.input_audio_buffer.commit()

        speaking = asyncio.ensure_future(speak())
        events = await collect(connection, items=1 if detection is None else 10**6)
        await speaking
    check_items(events)
    return events


def check_words(events: list[Any]) -> None:
    """Complete, in order, none twice, and the deltas are the transcript."""
    for completed in (event for event in events if event.type == COMPLETED):
        deltas = [event.delta for event in events if event.type == DELTA and event.item_id == completed.item_id]
        assert "".join(deltas) == completed.transcript
        assert "".join(entry.token for entry in completed.logprobs or ()).split() == completed.transcript.split()
    words = transcript(events).split()
    assert words == sorted(set(words))
    assert len(words) >= 0.6 * len(spoken(11.0)), words
    assert set(words) <= set(spoken(12.0))


async def test_words_come_while_somebody_speaks(scripted: Server) -> None:
    events = await dictate(scripted, None, pause=0.0)
    check_words(events)
    kinds = [event.type for event in events]
    assert kinds.index(DELTA) < kinds.index(COMMITTED)
    assert kinds.count(COMPLETED) == 1


async def test_scores_come_only_where_they_were_asked_for(scripted: Server) -> None:
    async with sdk(scripted) as client, client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm("jfk", 24_000)).decode())
        await connection.input_audio_buffer.commit()
        events = await collect(connection)
    assert transcript(events)
    assert all(event.logprobs is None for event in events if event.type == COMPLETED)


@pytest.mark.parametrize("how", ["crash_at", "break_at"])
@pytest.mark.parametrize(
    ("detection", "step"),
    [(None, 7), ({"type": "server_vad", "silence_duration_ms": 300}, 2)],
    ids=["in the middle", "as it begins"],
)
async def test_the_death_of_the_worker_is_not_noticed(
    tmp_path: Path, detection: dict[str, Any] | None, step: int, how: str
) -> None:
    """Killed in some step, or with an engine that will never work again; the next one goes on where it was."""
    with serving(model=f"scripted:{how}={step},once={tmp_path / 'once'}") as server:
        events = await dictate(server, detection, pause=0.8)
        assert (tmp_path / "once").exists(), "nobody died"
    check_words(events)


# ---------------------------------------------------------------- the SDK, beta


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_beta_with_g711(server: Server) -> None:
    name = "librivox-0890"
    mulaw = encode(np.concatenate([clip(name), silence(0.8)]), "mulaw", "pcm_mulaw", rate=8_000)
    async with sdk(server) as client:
        connecting = client.beta.realtime.connect(model="", extra_query={"intent": "transcription"})
        async with connecting as connection:
            created = json.loads(await connection.recv_bytes())
            assert created["type"] == "transcription_session.created"
            await connection.transcription_session.update(
                session={
                    "input_audio_format": "g711_ulaw",
                    "input_audio_transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                    "turn_detection": {"type": "server_vad", "silence_duration_ms": 500},
                }
            )
            for piece in pieces(mulaw, 160):
                await connection.input_audio_buffer.append(audio=piece)
            await connection.input_audio_buffer.commit()
            events = await collect(connection)
    assert events[0].type == "transcription_session.updated"
    assert "conversation.item.created" in {event.type for event in events}
    assert word_errors(transcripts()[name], transcript(events)) <= heard_by_file(server, name) + 2


# ---------------------------------------------------------------- plain WebSockets: URLs and keys


@asynccontextmanager
async def socket(server: Server, target: str, *subprotocols: str, key: str = "") -> AsyncIterator[ClientConnection]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"ws://127.0.0.1:{server.port}{target}"
    offered = [Subprotocol(name) for name in subprotocols]
    async with connect(url, subprotocols=offered or None, additional_headers=headers, proxy=None) as websocket:
        yield websocket


@pytest.mark.parametrize(
    "target",
    [
        "/v1/realtime",
        "/v1/realtime?intent=transcription",
        f"/v1/realtime?intent=transcription&model={MODEL}",
        "/v1/realtime?model=gpt-realtime",
        "/realtime?intent=transcription&model=whisper-1",
    ],
)
async def test_every_url_is_greeted_before_a_word_is_said(server: Server, target: str) -> None:
    async with socket(server, target) as websocket:
        assert json.loads(await websocket.recv())["type"] == "session.created"


async def test_another_model_is_refused_at_the_handshake(server: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with socket(server, "/v1/realtime?model=somebody/else"):
            pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["code"] == "model_not_found"


async def test_a_language_that_the_model_does_not_know_is_refused_and_changes_nothing(server: Server) -> None:
    async with socket(server, "/v1/realtime") as websocket:
        assert json.loads(await websocket.recv())["type"] == "session.created"
        for language, answer in (("de", "error"), ("en", "session.updated")):
            update = {"audio": {"input": {"transcription": {"language": language}}}}
            await websocket.send(json.dumps({"type": "session.update", "session": update}))
            said = json.loads(await websocket.recv())
            assert said["type"] == answer
            if answer == "error":
                assert said["error"]["param"] == "session.audio.input.transcription.language"
    asked = {"type": "transcription", "audio": {"input": {"transcription": {"language": "de"}}}}
    async with httpx.AsyncClient(base_url=server.url) as http:
        refusal = await http.post("/v1/realtime/client_secrets", json={"session": asked})
    assert refusal.status_code == 400
    with pytest.raises(InvalidStatus) as refused:
        async with socket(server, "/v1/realtime?language=de"):
            pass
    assert refused.value.response.status_code == 400


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("ek_AAAA.AAAA", 401)])
async def test_a_socket_without_a_key_is_refused_at_the_handshake(locked: Server, key: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with socket(locked, "/v1/realtime", key=key):
            pass
    assert refused.value.response.status_code == status


async def test_keys_in_a_header_and_as_a_browser_sends_them(locked: Server) -> None:
    async with socket(locked, "/v1/realtime", key=KEY) as websocket:
        assert json.loads(await websocket.recv())["type"] == "session.created"
    async with socket(locked, "/v1/realtime", "realtime", f"openai-insecure-api-key.{KEY}") as websocket:
        assert websocket.subprotocol == "realtime"
        assert json.loads(await websocket.recv())["type"] == "session.created"


async def test_a_client_secret_opens_a_session_as_it_was_ordered(locked: Server) -> None:
    async with sdk(locked, KEY) as client:
        secret = await client.realtime.client_secrets.create(
            expires_after={"anchor": "created_at", "seconds": 60},
            session={"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcmu"}}}},
        )
    assert secret.session.type == "transcription"
    subprotocols = ("realtime", f"openai-insecure-api-key.{secret.value}")
    async with socket(locked, "/v1/realtime", *subprotocols) as websocket:
        created = json.loads(await websocket.recv())
        assert created["session"]["audio"]["input"]["format"] == {"type": "audio/pcmu"}
    async with sdk(locked, secret.value) as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_secrets_of_beta(locked: Server) -> None:
    async with sdk(locked, KEY) as client:
        session = await client.beta.realtime.transcription_sessions.create(turn_detection={"silence_duration_ms": 300})
        assert session.turn_detection is not None
        assert session.turn_detection.silence_duration_ms == 300
        conversation = await client.beta.realtime.sessions.create(model="gpt-4o-realtime-preview")
    for value in (session.client_secret.value, conversation.client_secret.value):
        async with socket(locked, "/v1/realtime?intent=transcription", key=value) as websocket:
            assert json.loads(await websocket.recv())["type"] == "session.created"


def test_a_secret_needs_a_key_and_a_sane_request(locked: Server) -> None:
    door = "/v1/realtime/client_secrets"
    assert locked.http.post(door).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    assert locked.http.post(door, headers=headers).status_code == 200
    bad = locked.http.post(door, headers=headers, json={"expires_after": {"seconds": 5}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "expires_after.seconds")
    assert locked.http.post(door, headers=headers, content=b"[").status_code == 400
    assert locked.http.post(door, headers=headers, content=b" " * 100_000).status_code == 413
