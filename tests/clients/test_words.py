"""Words: what the server makes of real speech in the usual formats, against the engine alone on the same segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.messages import Lane
from tests.server import Server
from tests.speech import DATA, NAMES, Audio, clip, encode, transcripts, wav, word_errors
from worker.audio.decode import AudioFile
from worker.audio.vad import SileroVad
from worker.engines.base import Final, SequenceRequest
from worker.engines.embedded import EmbeddedEngine
from worker.files.segments import Segmenter, SegmentPolicy

ALLOWED = 2
"""Word errors over all clips together that decoding and encoding may add."""

FORMATS: dict[str, tuple[str, Callable[[Audio], bytes]]] = {
    "wav": ("wav", wav),
    "mp3, 64 kbit": ("mp3", lambda audio: encode(audio, "mp3", "mp3", bit_rate=64_000)),
    "opus in webm": ("webm", lambda audio: encode(audio, "webm", "libopus", rate=48_000, seekable=False)),
    "aac in m4a": ("m4a", lambda audio: encode(audio, "ipod", "aac", rate=44_100)),
}


@pytest.fixture(scope="module")
def engine_alone() -> int:
    """Word errors of the embedded engine on the segments that the worker would cut, without server or processes."""
    engine, vad = EmbeddedEngine(), SileroVad()
    capabilities = engine.load(lambda _phase, _fraction: None)
    policy = SegmentPolicy.up_to(capabilities.max_segment_s)
    try:
        return sum(word_errors(transcripts()[name], _heard(engine, Segmenter(vad, policy), name)) for name in NAMES)
    finally:
        engine.close()


def _heard(engine: EmbeddedEngine, segmenter: Segmenter, name: str) -> str:
    with AudioFile(DATA / f"{name}.wav") as blocks:
        segments = [segment for block in blocks for segment in segmenter.push(block)] + segmenter.flush()
    texts = []
    for segment in segments:
        sequence = engine.open(SequenceRequest(id=str(segment.index), lane=Lane.BATCH))
        engine.feed(sequence, segment.audio)
        engine.finish(sequence)
        (event,) = engine.step([sequence], 0)
        assert isinstance(event, Final)
        texts.append(event.text)
    return " ".join(texts)


@pytest.mark.parametrize("name", FORMATS)
def test_no_more_errors_than_the_engine_alone(server: Server, engine_alone: int, tmp_path: Path, name: str) -> None:
    suffix, encoded = FORMATS[name]
    errors: dict[str, int] = {}
    for speaker in NAMES:
        path = tmp_path / f"{speaker}.{suffix}"
        path.write_bytes(encoded(clip(speaker)))
        answer = server.transcribe(path)
        assert answer.status_code == 200, answer.text
        errors[speaker] = word_errors(transcripts()[speaker], answer.json()["text"])
    assert sum(errors.values()) <= engine_alone + ALLOWED, errors


def test_the_engine_alone_is_worth_comparing_with(engine_alone: int) -> None:
    """An engine that hears nothing would make every server look good."""
    said = sum(len(transcripts()[name].split()) for name in NAMES)
    assert engine_alone <= 0.06 * said
