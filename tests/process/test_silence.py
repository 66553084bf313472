"""What is no speech gives no text: "Thank you." is said by nobody in ten seconds of hum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pysrt
import pytest
import webvtt

from tests.server import Server, events_of, serving
from tests.speech import RATE, Audio, silence, wav

SECONDS = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def noise(level: float) -> Audio:
    """White noise with this root mean square."""
    random = np.random.default_rng(17)
    return (random.standard_normal(round(SECONDS * RATE)) * level).astype(np.float32)


def hum(level: float, frequency: float = 50.0) -> Audio:
    """Mains hum: a tone with its odd harmonics."""
    time = np.arange(round(SECONDS * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * frequency * part * time) / part for part in (1, 3, 5, 7))
    return np.asarray(level * tone, np.float32)


def clicks(level: float, every: float = 0.7) -> Audio:
    """Clicks of 2 ms, alternating in sign, such as a switch or a scratch makes."""
    audio = silence(SECONDS)
    for number, start in enumerate(range(RATE // 3, len(audio) - RATE // 10, round(every * RATE))):
        decay = np.exp(-np.arange(RATE // 500) / 8)
        audio[start : start + len(decay)] = level * (-1) ** number * decay
    return audio


SOUNDS: dict[str, Audio] = {
    "digital silence": silence(SECONDS),
    "white noise at -80 dBFS": noise(1e-4),
    "white noise at -50 dBFS": noise(0.003),
    "white noise at -30 dBFS": noise(0.03),
    "white noise at -14 dBFS": noise(0.2),
    "quiet hum": hum(0.01),
    "loud hum": hum(0.5),
    "hum at 60 Hz": hum(0.1, 60),
    "clicks": clicks(0.9),
    "hum and noise": hum(0.1) + noise(0.01),
    "clicks and noise": clicks(0.9) + noise(0.01),
    "hum and clicks": hum(0.1) + clicks(0.7),
    "all of it": hum(0.1) + clicks(0.7) + noise(0.02),
    "a constant": np.full(round(SECONDS * RATE), 0.5, np.float32),
}
SOME = ("digital silence", "all of it")
"""Sounds that are asked for in every format."""


@pytest.fixture
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav(SOUNDS[request.param]))
    return path


@pytest.mark.parametrize("sound", SOUNDS, indirect=True)
def test_no_text(server: Server, sound: Path) -> None:
    answer = server.transcribe(sound)
    assert answer.status_code == 200
    assert answer.json()["text"] == ""


@pytest.mark.parametrize("sound", SOME, indirect=True)
def test_json(server: Server, sound: Path) -> None:
    answer = server.transcribe(sound)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"text": "", "usage": {"type": "duration", "seconds": 10}}


@pytest.mark.parametrize("sound", SOME, indirect=True)
def test_verbose_json(server: Server, sound: Path) -> None:
    fields: dict[str, Any] = {"timestamp_granularities[]": ["word", "segment"]}
    body = server.transcribe(sound, response_format="verbose_json", **fields).json()
    assert (body["text"], body["segments"], body["words"]) == ("", [], [])
    assert body["duration"] == SECONDS
    assert body["language"] in {"english", "unknown"}


@pytest.mark.parametrize("sound", SOME, indirect=True)
def test_text(server: Server, sound: Path) -> None:
    answer = server.transcribe(sound, response_format="text")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == ""


@pytest.mark.parametrize("sound", SOME, indirect=True)
def test_subtitles(server: Server, sound: Path) -> None:
    parser: Any = pysrt
    body = server.transcribe(sound, response_format="srt").text
    assert len(parser.from_string(body, error_handling=parser.ERROR_RAISE)) == 0
    body = server.transcribe(sound, response_format="vtt").text
    assert body.startswith("WEBVTT")
    assert webvtt.from_string(body).captions == []


@pytest.mark.parametrize("sound", SOME, indirect=True)
def test_stream(server: Server, sound: Path) -> None:
    answer = server.transcribe(sound, stream="true")
    (done,) = events_of(answer.text)
    assert done == {"type": "transcript.text.done", "text": "", "usage": {"type": "duration", "seconds": 10}}
    assert json.loads(answer.text.split("\n")[0].removeprefix("data: ")) == done
    assert answer.text.endswith("data: [DONE]\n\n")
