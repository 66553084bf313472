"""A call with Qwen3-ASR through the native socket: deltas as words become certain, their sum the final, words of the file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking
from tests.process.test_qwen3 import TINY, WAVES, said
from tests.server import Server, serving
from tests.speech import Audio, silence, word_errors

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="needs the `qwen` extra"
    ),
]

CLIPS = [next(path for path in WAVES if path.stem == name) for name in ("flite-awb", "pico-en-us")]


@pytest.fixture(scope="module")
def latency_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latency") / "log"


@pytest.fixture(scope="module")
def server(latency_log: Path) -> Iterator[Server]:
    with serving(model=TINY, threads=1, latency_log=latency_log) as running:
        yield running


def audio_of(index: int) -> Audio:
    from tests.torch.running import read_audio

    return read_audio(CLIPS[index])


async def test_two_utterances_of_a_call(server: Server, latency_log: Path) -> None:
    """At the pace of speech. Deltas of an utterance are its final; words are those of the file, but for early guesses."""
    await asyncio.to_thread(server.http.post, f"/api/ps/{TINY.name}")
    pause = silence(0.9)
    sound = np.concatenate([audio_of(0), pause, audio_of(1), pause])
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        await talk.say(s16(sound))
        await talk.close()
    finals = talk.of("final")
    assert len(finals) == len(CLIPS)
    for final, path in zip(finals, CLIPS, strict=True):
        deltas = [event["text"] for event in talk.of("delta") if event["utterance"] == final["utterance"]]
        assert "".join(deltas) == final["text"]
        # What was certain for two updates stays, also where the small model changes its mind later.
        assert word_errors(said(path), final["text"]) <= 2, (said(path), final["text"])
    assert any(event["utterance"] == 0 for event in talk.of("partial"))
    for final, line in zip(finals, latency_log.read_text().splitlines(), strict=True):
        spent = json.loads(line)
        assert spent["encode_ms"] > 0 < spent["prefill_ms"]
        # Under 8 s of sound: the one open window, once an update, and never for anything heard before.
        updates = 2 + (final["end"] - final["start"] + 1.0) / 0.32
        assert 2 <= spent["windows"] <= updates
        assert final["timings"]["buffered"] >= 0


async def test_a_call_faster_than_speech_is_heard_whole(server: Server) -> None:
    async with talking(server, "language=en") as talk:
        await talk.socket.send(s16(np.concatenate([audio_of(0), silence(0.9)])))
        await talk.close()
    assert word_errors(said(CLIPS[0]), talk.text) <= 2
