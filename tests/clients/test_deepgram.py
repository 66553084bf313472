"""``WS /v1/listen`` with Deepgram's own SDK, unmodified, and with plain ``websockets`` where the SDK hides something."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from deepgram import AsyncDeepgramClient, DeepgramClient, DeepgramClientEnvironment
from deepgram.core.api_error import ApiError
from deepgram.core.events import EventType
from deepgram.listen.v1.types import (
    ListenV1Error,
    ListenV1Metadata,
    ListenV1Results,
    ListenV1SpeechStarted,
    ListenV1UtteranceEnd,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.clients.pace import at_real_time, mulaw, s16, speech_only
from tests.server import Server, serving
from tests.speech import DATA, clip, silence, word_errors, words

FIRST, SECOND = "librivox-0880", "librivox-0930"
PATIENCE_SECONDS = 30.0

pytestmark = pytest.mark.filterwarnings("ignore:websockets:DeprecationWarning")
"""Their SDK imports names that websockets is about to drop."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with serving(model="scripted", api_keys="secret") as running:
        yield running


def where(server: Server) -> DeepgramClientEnvironment:
    ws = f"ws://127.0.0.1:{server.port}"
    return DeepgramClientEnvironment(base=server.url, production=ws, agent=ws, agent_rest=server.url)


def client(server: Server, key: str = "unused") -> AsyncDeepgramClient:
    return AsyncDeepgramClient(api_key=key, environment=where(server))


def url(server: Server, query: str) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/listen?{query}"


def transcript(results: ListenV1Results) -> str:
    return str(results.channel.alternatives[0].transcript)


async def file_text(server: Server, name: str) -> str:
    answer = await asyncio.to_thread(server.transcribe, DATA / f"{name}.wav")
    return str(answer.json()["text"])


# ---------------------------------------------------------------- the SDK


async def test_a_conversation_with_their_sdk(server: Server) -> None:
    """Interims, finals, UtteranceEnd in the pause, Finalize, KeepAlive, CloseStream: in order, each of its type."""
    said: list[Any] = []
    ended = asyncio.Event()

    def keep(message: Any) -> None:
        said.append(message)
        if isinstance(message, ListenV1UtteranceEnd):
            ended.set()

    async with client(server).listen.v1.connect(
        model="nova-3",
        language="en",
        encoding="linear16",
        sample_rate="16000",
        interim_results="true",
        endpointing="300",
        utterance_end_ms="1000",
        vad_events="true",
        smart_format="true",
    ) as line:
        line.on(EventType.MESSAGE, keep)
        listening = asyncio.ensure_future(line.start_listening())
        await at_real_time(line.send_media, s16(clip(FIRST)), 32_000)
        while not ended.is_set():  # silence until their server would say that the utterance has ended
            await at_real_time(line.send_media, s16(silence(0.1)), 32_000)
        await line.send_keep_alive()
        await at_real_time(line.send_media, s16(speech_only(clip(SECOND))), 32_000)
        await line.send_finalize()
        await line.send_close_stream()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await listening
    check_conversation(said)
    first, second = [message for message in said if isinstance(message, ListenV1Results) and message.is_final]
    assert word_errors(await file_text(server, FIRST), transcript(first)) <= 2
    assert word_errors(await file_text(server, SECOND), transcript(second)) <= 2


def check_conversation(said: list[Any]) -> None:
    assert not any(isinstance(message, ListenV1Error) for message in said)
    assert isinstance(said[0], ListenV1SpeechStarted)
    assert isinstance(said[-1], ListenV1Metadata)
    results = [message for message in said if isinstance(message, ListenV1Results)]
    assert any(not message.is_final for message in results), "no interim"
    finals = [message for message in results if message.is_final]
    assert [(final.speech_final, final.from_finalize) for final in finals] == [(True, False), (True, True)]
    [end] = [message for message in said if isinstance(message, ListenV1UtteranceEnd)]
    assert said.index(finals[0]) < said.index(end) < said.index(finals[1])
    spoken = finals[0].channel.alternatives[0].words
    assert end.last_word_end == spoken[-1].end
    assert words(" ".join(word.punctuated_word or "" for word in spoken)) == words(transcript(finals[0]))
    clock = 0.0
    for final in finals:
        for word in final.channel.alternatives[0].words:
            assert clock <= word.start <= word.end
            clock = word.end
    assert said[-1].duration >= clock


def test_their_blocking_client_and_a_telephone_line(server: Server) -> None:
    with DeepgramClient(api_key="unused", environment=where(server)).listen.v1.connect(
        model="nova-2-phonecall", encoding="mulaw", sample_rate="8000"
    ) as line:
        data = mulaw(np.concatenate([clip(SECOND), silence(0.8)]))
        for start in range(0, len(data), 160):
            line.send_media(data[start : start + 160])
        line.send_close_stream()
        said = list(line)
    finals = [message for message in said if isinstance(message, ListenV1Results)]
    assert all(final.is_final for final in finals), "interims were not asked for"
    heard = " ".join(transcript(final) for final in finals)
    expected = server.transcribe(DATA / f"{SECOND}.wav").json()["text"]
    assert word_errors(expected, heard) <= 2
    assert said[-1].sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("key", ["secret", "wrong"])
async def test_their_key_goes_in_as_token(scripted: Server, key: str) -> None:
    line = client(scripted, key).listen.v1.connect(model="nova-3", encoding="linear16", sample_rate="16000")
    if key == "wrong":
        with pytest.raises(ApiError) as caught:
            async with line:
                pass
        assert caught.value.status_code == 401
        return
    async with line as open_line:
        await open_line.send_finalize()
        answer = await open_line.recv()
        assert isinstance(answer, ListenV1Results)
        assert answer.from_finalize
        await open_line.send_close_stream()
        assert isinstance(await open_line.recv(), ListenV1Metadata)


# ---------------------------------------------------------------- by hand


async def test_a_browser_brings_its_key_as_a_subprotocol(scripted: Server) -> None:
    async with connect(url(scripted, "encoding=mulaw"), subprotocols=["token", "secret"]) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "token"
        await socket.send('{"type":"CloseStream"}')
        assert json.loads(await socket.recv())["type"] == "Metadata"
        with pytest.raises(Exception, match="1000"):
            await socket.recv()
    assert socket.close_code == 1000


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("encoding=linear16", 400, "missing_field"),
        ("encoding=mp4a&sample_rate=8000", 501, "unsupported"),
        ("encoding=mulaw&diarize=true", 501, "unsupported"),
        ("encoding=mulaw&model=gpt-9", 404, "model_not_found"),
    ],
)
async def test_what_cannot_be_done_is_refused_at_the_handshake(
    scripted: Server, query: str, status: int, code: str
) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await connect(url(scripted, query), additional_headers={"Authorization": "Token secret"})
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == code


async def test_a_stream_of_g729_is_as_long_as_its_frames_say(scripted: Server) -> None:
    """There is no encoder to make speech with; 10 bytes are 10 ms whatever they say, and pieces need not be frames."""
    sound = np.random.default_rng(3).bytes(1500)
    headers = {"Authorization": "Token secret"}
    async with connect(url(scripted, "encoding=g729&sample_rate=8000"), additional_headers=headers) as socket:
        for start in range(0, len(sound), 33):
            await socket.send(sound[start : start + 33])
        await socket.send('{"type":"CloseStream"}')
        messages = [json.loads(message) async for message in socket]
    assert messages[-1]["type"] == "Metadata"
    assert messages[-1]["duration"] == pytest.approx(1.5, abs=0.001)
    assert socket.close_code == 1000


async def test_a_language_that_the_model_does_not_know_is_refused_at_the_handshake(server: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url(server, "encoding=linear16&sample_rate=16000&language=de")):
            pass
    assert refused.value.response.status_code == 400
    assert b"German" in refused.value.response.body


async def test_words_without_a_gap_at_any_size_of_frame(scripted: Server) -> None:
    """Odd pieces, cut in the middle of samples; the clock engine has a word for every 320 ms of what it heard."""
    data = s16(np.concatenate([clip(FIRST), silence(1.0), clip(SECOND)]))
    query = "encoding=linear16&sample_rate=16000&interim_results=true"
    async with connect(url(scripted, query), additional_headers={"Authorization": "Bearer secret"}) as socket:
        for start in range(0, len(data), 1_999):
            await socket.send(data[start : start + 1_999])
        await socket.send('{"type":"CloseStream"}')
        said = [json.loads(message) async for message in socket]
    finals = [message for message in said if message["type"] == "Results" and message["is_final"]]
    assert len(finals) == 2
    for final in finals:
        times = [int(word.removeprefix("s")) for word in final["channel"]["alternatives"][0]["transcript"].split()]
        assert times == list(range(times[0], times[-1] + 320, 320))
        assert times[-1] - times[0] > 1_500


@pytest.mark.slow
async def test_ten_seconds_without_a_word_end_it_as_theirs_does(scripted: Server) -> None:
    headers = {"Authorization": "Token secret"}
    async with connect(url(scripted, "encoding=mulaw"), additional_headers=headers) as socket:
        with pytest.raises(ConnectionClosedError):
            async with asyncio.timeout(20):
                while True:
                    await socket.recv()
    assert socket.close_code == 1011
    assert (socket.close_reason or "").startswith("NET-0001")
