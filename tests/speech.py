"""Human speech for tests, and what becomes of it: joined with pauses, without pauses, encoded, counted in word errors.

The clips and their transcripts lie in ``tests/data`` (its README names source and licence).
"""

from __future__ import annotations

import io
import json
import re
import wave
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Audio = npt.NDArray[np.float32]

DATA = Path(__file__).parent / "data"
RATE = 16_000

NAMES = ("librivox-0870", "librivox-0880", "librivox-0890", "librivox-0920", "librivox-0930", "jfk")
"""Clips in the order of the book; two speakers."""


@cache
def transcripts() -> dict[str, str]:
    """What is said in each clip."""
    loaded: dict[str, str] = json.loads((DATA / "transcripts.json").read_text())
    return loaded


def clip(name: str) -> Audio:
    """One clip, float32 mono 16 kHz."""
    with wave.open(str(DATA / f"{name}.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return samples.astype(np.float32) / np.float32(32768)


def silence(seconds: float) -> Audio:
    return np.zeros(round(seconds * RATE), np.float32)


def join(clips: Sequence[Audio], pauses: Sequence[float]) -> Audio:
    """The clips with a pause (seconds, digital silence) before each; ``pauses`` repeats as often as needed."""
    parts = [part for audio, pause in zip(clips, cycle(pauses), strict=False) for part in (silence(pause), audio)]
    return np.concatenate(parts)


def without_pauses(audio: Audio, *, quiet: float = 0.06, keep: float = 0.03) -> Audio:
    """The audio without its quiet stretches: 20 ms frames below ``quiet`` times the loudest frame's level are left out,
    but for ``keep`` seconds around the others. Speech as nobody talks, but with no place to cut."""
    frame = RATE // 50
    frames = audio[: len(audio) // frame * frame].reshape(-1, frame)
    level = np.sqrt((frames**2).mean(axis=1))
    loud = level > quiet * level.max()
    spread = round(keep * 50)
    around = np.convolve(loud, np.ones(2 * spread + 1), "same") > 0
    return frames[around].reshape(-1)


def recital(
    repeats: int, pauses: Sequence[float], *, names: Sequence[str] = NAMES, trim: bool = False
) -> tuple[Audio, str]:
    """All clips in turn, ``repeats`` times, with pauses before each, and the text that is said."""
    order = list(names) * repeats
    clips = {name: without_pauses(clip(name)) if trim else clip(name) for name in names}
    return join([clips[name] for name in order], pauses), " ".join(transcripts()[name] for name in order)


def words(text: str) -> list[str]:
    """Lower case, no punctuation, hyphens split."""
    return re.findall(r"[\w']+", text.lower().replace("’", "'").replace("-", " "))


def word_errors(reference: str, hypothesis: str) -> int:
    """Substitutions, deletions and insertions, after both were brought to ``words``."""
    import jiwer

    said, heard = words(reference), words(hypothesis)
    if not heard:
        return len(said)
    result = jiwer.process_words(" ".join(said), " ".join(heard))
    return result.substitutions + result.deletions + result.insertions


def resample(audio: Audio, rate: int) -> Audio:
    import soxr

    out: Audio = soxr.resample(audio, RATE, rate)
    return out


def wav(audio: Audio, *, rate: int = RATE) -> bytes:
    """16-bit mono WAV of audio that is at ``rate`` already."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((audio.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


class _Pipe:
    """A sink that cannot seek: what a recorder that writes as it goes leaves behind."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, piece: bytes) -> int:
        self.data += piece
        return len(piece)


def encode(
    audio: Audio,
    container: str,
    codec: str,
    *,
    rate: int = RATE,
    channels: int = 1,
    bit_rate: int = 0,
    seekable: bool = True,
    picture: bool = False,
    options: dict[str, str] | None = None,
) -> bytes:
    """The audio (16 kHz) as a file of FFmpeg's ``container`` and ``codec``, resampled to ``rate``, on all ``channels``.

    ``seekable=False`` writes as to a pipe: webm as MediaRecorder makes it, without a duration. ``picture`` adds a video
    track in front.
    """
    sink: Any = io.BytesIO() if seekable else _Pipe()
    with av.open(sink, "w", format=container, options=options or {}) as output:
        video = _add_video(output) if picture else None
        stream: Any = output.add_stream(codec, rate=rate, layout={1: "mono", 2: "stereo", 6: "5.1"}[channels])
        if bit_rate:
            stream.bit_rate = bit_rate
        if video is not None:
            _write_video(output, video, len(audio) / RATE)
        for frame in _frames(resample(audio, rate) if rate != RATE else audio, rate, channels):
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return sink.getvalue() if seekable else bytes(sink.data)


def _frames(audio: Audio, rate: int, channels: int) -> Iterator[Any]:
    size, position = 1024, 0
    for start in range(0, len(audio), size):
        piece = np.repeat(audio[start : start + size][None], channels, axis=0)
        frame = av.AudioFrame.from_ndarray(piece, "fltp", {1: "mono", 2: "stereo", 6: "5.1"}[channels])
        frame.sample_rate, frame.pts = rate, position
        position += piece.shape[1]
        yield frame


def _add_video(output: Any) -> Any:
    stream = output.add_stream("mpeg4", rate=5)
    stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
    return stream


def _write_video(output: Any, stream: Any, seconds: float) -> None:
    for number in range(max(1, int(seconds * 5))):
        picture = np.full((48, 64, 3), number * 7 % 256, np.uint8)
        output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
    output.mux(stream.encode(None))
