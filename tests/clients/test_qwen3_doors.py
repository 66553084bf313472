"""Qwen3-ASR behind each dialect's real client, and two models as one server: the small one hears calls, the other one has the last word."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from deepgram.core.events import EventType
from deepgram.listen.v1.types import ListenV1Results
from wyoming.asr import Transcript
from wyoming.client import AsyncTcpClient

from tests.clients import test_deepgram as deepgram
from tests.clients import test_openai_realtime as realtime
from tests.clients import test_wyoming as wyoming
from tests.clients.pace import at_real_time, s16
from tests.clients.test_live_native import talking
from tests.process.test_qwen3 import TINY, WAVES, said
from tests.server import Server, free_port, serving
from tests.speech import Audio, resample, silence, word_errors

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:websockets:DeprecationWarning"),  # Deepgram's SDK
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="needs the `qwen` extra"
    ),
]

CLIP = next(path for path in WAVES if path.stem == "flite-awb")
APART = 2
"""Words that a call may say otherwise than a file: what was certain for two updates stays."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Server, int]]:
    port = free_port()
    with serving(model=TINY, threads=1, wyoming_port=port) as running:
        running.http.post(f"/api/ps/{TINY.name}").raise_for_status()
        yield running, port


def sound() -> Audio:
    from tests.torch.running import read_audio

    return np.concatenate([read_audio(CLIP), silence(0.9)])


async def test_wyoming(server: tuple[Server, int]) -> None:
    """Not streamed and streamed; the chunks of the latter are its transcript."""
    async with AsyncTcpClient("127.0.0.1", server[1]) as client:
        events = await wyoming.speak(client, s16(sound()), language="en")
    text = Transcript.from_event(events[-1]).text
    assert word_errors(said(CLIP), text) <= APART
    events, early = await wyoming.speak_and_listen(server[1], s16(sound()), language="en")
    assert word_errors(said(CLIP), wyoming.streamed(events)) <= APART
    assert early > 1, "nothing came while audio was sent"


async def test_openai_realtime(server: tuple[Server, int]) -> None:
    """Deltas are the transcript, at 24 kHz."""
    pcm = s16(resample(sound(), 24_000))
    async with (
        realtime.sdk(server[0]) as client,
        client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
    ):

        async def speak() -> None:
            for piece in realtime.pieces(pcm, 2_400):
                await connection.input_audio_buffer.append(audio=piece)
                await asyncio.sleep(0.05)
            await connection.input_audio_buffer.commit()

        speaking = asyncio.ensure_future(speak())
        events = await realtime.collect(connection)
        await speaking
    realtime.check_items(events)
    text = realtime.transcript(events)
    assert "".join(event.delta for event in events if event.type == realtime.DELTA) == text.strip()
    assert word_errors(said(CLIP), text) <= APART


async def test_deepgram(server: tuple[Server, int]) -> None:
    """Interims while somebody speaks, then a final with times that rise."""
    results: list[ListenV1Results] = []

    def keep(message: object) -> None:
        if isinstance(message, ListenV1Results):
            results.append(message)

    wish = {"model": "nova-3", "language": "en", "encoding": "linear16", "sample_rate": "16000"}
    async with deepgram.client(server[0]).listen.v1.connect(**wish, interim_results="true") as line:
        line.on(EventType.MESSAGE, keep)
        listening = asyncio.ensure_future(line.start_listening())
        await at_real_time(line.send_media, s16(sound()), 32_000)
        await line.send_close_stream()
        async with asyncio.timeout(deepgram.PATIENCE_SECONDS):
            await listening
    finals = [result for result in results if result.is_final]
    assert len(results) > len(finals) > 0
    text = " ".join(deepgram.transcript(final) for final in finals).strip()
    assert word_errors(said(CLIP), text) <= APART
    times = [
        time for final in finals for word in final.channel.alternatives[0].words for time in (word.start, word.end)
    ]
    assert times
    assert times == sorted(times)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    small = tmp_path_factory.mktemp("models") / "small"
    small.symlink_to(TINY, target_is_directory=True)
    with serving(model=TINY, live_model=small, threads=1) as running:
        running.http.post(f"/api/ps/{TINY.name}").raise_for_status()
        yield running


async def test_a_call_with_two_models(pair: Server) -> None:
    """Partials of the one, a final of the other that goes on after what was said; deltas are the final."""
    async with talking(pair, "language=en") as talk:
        await talk.until("ready")
        await talk.say(s16(sound()))
        await talk.close()
    assert talk.of("partial")
    assert "".join(event["text"] for event in talk.of("delta")) == talk.text
    assert word_errors(said(CLIP), talk.text) <= APART


def test_a_file_with_two_models_is_the_main_ones(pair: Server) -> None:
    assert pair.transcribe(CLIP, language="en").json()["text"] == said(CLIP)


def test_both_models_are_told(pair: Server) -> None:
    worker = pair.worker
    assert (worker["engine"], Path(worker["live_model"]).name) == ("qwen3", "small")
    assert worker["slots"] > 0 < worker["live_slots"]
