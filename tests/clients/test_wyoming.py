"""Home Assistant's way: the ``wyoming`` package's own client, a connection an utterance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStart, TranscriptStop
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from tests.clients.pace import at_real_time
from tests.server import Server, free_port, serving
from tests.speech import DATA, clip, transcripts, word_errors

CHUNK = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, int]]:
    port = free_port()
    with serving(wyoming_port=port) as running:
        yield running, port


@pytest.fixture(scope="module")
def certain() -> Iterator[int]:
    """Port of a server whose engine keeps what it has said."""
    port = free_port()
    with serving(model="scripted", wyoming_port=port):
        yield port


async def next_event(client: AsyncTcpClient) -> Event:
    async with asyncio.timeout(30):
        event = await client.read_event()
    assert event is not None
    return event


async def speak(client: AsyncTcpClient, pcm: bytes, rate: int = 16_000, **wish: Any) -> list[Event]:
    """As Home Assistant does it; returns everything up to the transcript."""
    await client.write_event(Transcribe(**wish).event())
    await client.write_event(AudioStart(rate=rate, width=2, channels=1).event())
    for begin in range(0, len(pcm), CHUNK):
        chunk = AudioChunk(rate=rate, width=2, channels=1, audio=pcm[begin : begin + CHUNK])
        await client.write_event(chunk.event())
    await client.write_event(AudioStop().event())
    events = [await next_event(client)]
    while not Transcript.is_type(events[-1].type):
        events.append(await next_event(client))
    return events


async def speak_and_listen(port: int, audio: bytes, **wish: Any) -> tuple[list[Event], int]:
    """At the pace of speech, reading meanwhile: everything up to ``transcript-stop``, and how much of it came before
    ``audio-stop``."""
    events: list[Event] = []
    async with AsyncTcpClient("127.0.0.1", port) as client:

        async def listen() -> None:
            while not events or not TranscriptStop.is_type(events[-1].type):
                events.append(await next_event(client))

        await client.write_event(Transcribe(**wish).event())
        await client.write_event(AudioStart(rate=16_000, width=2, channels=1).event())
        listening = asyncio.ensure_future(listen())

        async def send(piece: bytes) -> None:
            await client.write_event(AudioChunk(rate=16_000, width=2, channels=1, audio=piece).event())

        await at_real_time(send, audio, 32_000)
        early = len(events)
        await client.write_event(AudioStop().event())
        await listening
    return events, early


def streamed(events: list[Event]) -> str:
    """The text of a streamed transcript, whose order is checked."""
    types = [event.type for event in events]
    assert types[0] == "transcript-start"
    assert types[-2:] == ["transcript", "transcript-stop"]
    assert set(types[1:-2]) == {"transcript-chunk"}
    text: str = Transcript.from_event(events[-2]).text
    assert "".join(TranscriptChunk.from_event(event).text for event in events[1:-2]) == text
    return text


def pcm(name: str) -> bytes:
    return (clip(name) * 32767).astype("<i2").tobytes()


async def test_describe_offers_the_model_and_its_languages(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        await client.write_event(Describe().event())
        info = Info.from_event(await next_event(client))
    (program,) = info.asr
    assert program.installed
    assert program.supports_transcript_streaming
    assert program.models[0].languages == ["en"]


async def test_an_utterance_and_its_streamed_transcript(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await speak(client, pcm("librivox-0930"), language="en")
    transcript = Transcript.from_event(events[-1])
    assert word_errors(transcripts()["librivox-0930"], transcript.text) <= 2
    assert TranscriptStart.is_type(events[0].type)
    chunks = [TranscriptChunk.from_event(event).text for event in events if TranscriptChunk.is_type(event.type)]
    assert "".join(chunks) == transcript.text


async def test_what_is_certain_comes_while_audio_is_sent(certain: int) -> None:
    """A word for every 320 ms, none missing or twice, and the first long before the last was spoken."""
    await speak_and_listen(certain, pcm("librivox-0880")[:32_000])  # the worker is awake
    events, early = await speak_and_listen(certain, pcm("librivox-0880"), language="de")
    assert early >= 3, "transcript-start and some chunks before audio-stop"
    assert TranscriptStart.from_event(events[0]).language == "de"
    times = [int(word.removeprefix("s")) for word in streamed(events).split()]
    assert times == list(range(times[0], times[-1] + 320, 320))


async def test_who_does_not_read_before_the_end_gets_the_same(certain: int) -> None:
    """Home Assistant reads when it has sent everything, and knows of ``transcript`` alone."""
    heard, _ = await speak_and_listen(certain, pcm("librivox-0880"))
    async with AsyncTcpClient("127.0.0.1", certain) as client:
        events = await speak(client, pcm("librivox-0880"))
    assert [event.type for event in events].count("transcript") == 1
    assert Transcript.from_event(events[-1]).text == streamed(heard)


@pytest.mark.parametrize("name", ["jfk", "librivox-0880", "librivox-0930"])
async def test_speech_at_its_own_pace_is_heard_as_a_file_is(server: tuple[Server, int], name: str) -> None:
    """Word errors against what the file door of the same server makes of the same clip."""
    running, port = server
    file = await asyncio.to_thread(running.transcribe, DATA / f"{name}.wav")
    events, _ = await speak_and_listen(port, pcm(name), language="en")
    heard = streamed(events)
    assert word_errors(file.json()["text"], heard) <= 2, heard


async def test_longer_than_the_engine_takes_at_once(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await speak(client, pcm("librivox-0870") + pcm("librivox-0920"))
    said = transcripts()["librivox-0870"] + " " + transcripts()["librivox-0920"]
    assert word_errors(said, Transcript.from_event(events[-1]).text) <= 5


async def test_two_utterances_on_one_connection(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        texts = [
            Transcript.from_event((await speak(client, pcm(name)))[-1]).text
            for name in ("librivox-0880", "librivox-0930")
        ]
    assert word_errors(transcripts()["librivox-0880"], texts[0]) <= 3
    assert word_errors(transcripts()["librivox-0930"], texts[1]) <= 2


@pytest.mark.parametrize("seconds", [0, 0.01, 2])
async def test_silence_gives_an_empty_transcript(server: tuple[Server, int], seconds: float) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await speak(client, bytes(int(seconds * 16_000) * 2))
    assert [Transcript.from_event(event).text for event in events] == [""]


async def test_stop_without_start_gives_an_empty_transcript(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        await client.write_event(AudioStop().event())
        assert Transcript.from_event(await next_event(client)).text == ""


async def test_eight_kilohertz(server: tuple[Server, int]) -> None:
    audio = clip("librivox-0930")
    half = (audio[: len(audio) // 2 * 2].reshape(-1, 2).mean(axis=1) * 32767).astype("<i2").tobytes()
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await speak(client, half, rate=8_000)
    assert word_errors(transcripts()["librivox-0930"], Transcript.from_event(events[-1]).text) <= 3


@pytest.mark.parametrize("language", ["klingon", "de"], ids=["no-language", "not-the-model's"])
async def test_a_language_nobody_knows_is_an_error_and_a_transcript(server: tuple[Server, int], language: str) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await speak(client, pcm("librivox-0930")[:3200], language=language)
    assert events[0].type == "error"
    assert events[0].data["code"] == "invalid_value"
    assert Transcript.from_event(events[-1]).text == ""


async def test_ping(server: tuple[Server, int]) -> None:
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        await client.write_event(Ping("are you there").event())
        assert Pong.from_event(await next_event(client)).text == "are you there"


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b'{"type":"audio-chunk","payload_length":99999999999}\n',
        b'{"type":"audio-chunk","payload_length":-1}\n',
        b'{"type":"x","data_length":5}\n[1,2]',
        b"x" * 200_000,
        b'{"type":"audio-start","data":{"rate":"fast"}}\n',
        b'{"type":"audio-start","data":{"rate":16000,"width":3,"channels":1}}\n',
    ],
)
async def test_rubbish_gets_an_error_and_the_end(server: tuple[Server, int], rubbish: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server[1])
    try:
        writer.write(rubbish)
        writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
    except OSError:  # a reset, or a shutdown of what is reset already
        assert len(rubbish) > 100_000
        return  # it was still sending when it was cut off
    finally:
        writer.close()
    if answer or len(rubbish) < 100_000:  # a reset, for what was still on its way, may overtake the answer
        assert json.loads(answer.split(b"\n")[0])["type"] == "error"


async def test_leaving_in_mid_utterance_leaves_nothing(server: tuple[Server, int]) -> None:
    running, port = server
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(AudioStart(rate=16_000, width=2, channels=1).event())
        silence = np.zeros(CHUNK, "<i2").tobytes()
        await client.write_event(AudioChunk(rate=16_000, width=2, channels=1, audio=silence).event())
    async with asyncio.timeout(10):
        while running.ps()["queue"]["live"]["open"]:
            await asyncio.sleep(0.02)
