"""Long recordings: every sentence is there, memory does not grow with the length, and the first words come soon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jiwer
import numpy as np
import pytest

from tests.process.fakes import GUARD
from tests.server import Server, events_of, serving
from tests.speech import DATA, NAMES, Audio, clip, join, recital, silence, transcripts, wav, words

FIRST_DELTA_SECONDS = 3.0
GROWTH_MIB = 150
"""Of the worker's memory from a file of half a minute to any other."""
PAUSES = (0.4, 1.1, 0.7, 2.5)
"""Seconds before each sentence, in turn; against six sentences in turn, each has every pause in front of it."""
FOUND = 0.6
"""Share of a sentence's words that must be right for it to count as there."""
EDGE = 3
"""Words on each side of a join that are looked at."""
LOST_SHARE = 0.02
"""Of those words. The engine hears a sentence beside others a little differently; a cut that lost words would lose more."""
GRID = 320 * 16
"""Samples between two words of the scripted engine."""


@dataclass(frozen=True)
class Streamed:
    text: str
    first_delta_s: float
    deltas: int


def peak_mib(pid: int) -> float:
    """Highest resident memory of a process in its life."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def stream(server: Server, path: Path) -> Streamed:
    began, first, body = time.monotonic(), 0.0, ""
    with (
        path.open("rb") as file,
        server.http.stream("POST", "/v1/audio/transcriptions/stream", files={"file": file}) as answer,
    ):
        for piece in answer.iter_text():
            body += piece
            first = first or ("transcript.text.delta" in body and time.monotonic() - began)
    *deltas, done = events_of(body)
    assert "".join(event["delta"] for event in deltas) == done["text"]
    return Streamed(done["text"], first, len(deltas))


def rightly_heard(order: Sequence[str], heard: str) -> list[list[bool]]:
    """Of each sentence that was said, which of its words are in the text, by alignment of the whole."""
    said = [words(transcripts()[name]) for name in order]
    aligned = jiwer.process_words(" ".join(word for sentence in said for word in sentence), " ".join(words(heard)))
    right: set[int] = set()
    for chunk in aligned.alignments[0]:
        if chunk.type == "equal":
            right.update(range(chunk.ref_start_idx, chunk.ref_end_idx))
    place = iter(range(sum(map(len, said))))
    return [[next(place) in right for _ in sentence] for sentence in said]


def missing(order: Sequence[str], heard: str) -> list[tuple[int, str]]:
    """Place and name of each sentence that was said and is not in the text."""
    right = rightly_heard(order, heard)
    return [(n, order[n]) for n, marks in enumerate(right) if sum(marks) < FOUND * len(marks)]


def test_missing_finds_what_is_missing() -> None:
    order = list(NAMES) * 3
    text = " ".join(transcripts()[name] for name in order)
    assert missing(order, text) == []
    assert missing(order, text.removesuffix(transcripts()[order[-1]])) == [(len(order) - 1, order[-1])]
    without_one = " ".join(transcripts()[name] for place, name in enumerate(order) if place != 7)
    assert missing(order, without_one) == [(7, order[7])]


def lost_at_joins(order: Sequence[str], heard: str, alone: dict[str, str]) -> int:
    """Words on either side of a join that are not in the text, although they are where the engine hears the clip alone."""
    baseline = {name: rightly_heard([name], text)[0] for name, text in alone.items()}
    lost = 0
    for name, marks in zip(order, rightly_heard(order, heard), strict=True):
        for edge in (slice(EDGE), slice(-EDGE, None)):
            lost += sum(was and not found for was, found in zip(baseline[name][edge], marks[edge], strict=True))
    return lost


def test_lost_at_joins_counts_what_is_lost() -> None:
    order = [NAMES[0], NAMES[1], NAMES[0]]
    alone = {name: transcripts()[name] for name in NAMES}
    text = " ".join(transcripts()[name] for name in order)
    assert lost_at_joins(order, text, alone) == 0
    assert lost_at_joins(order, text.rsplit(" ", 2)[0], alone) == 2


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(4, marks=pytest.mark.timeout(240)),
        pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_long_file(tmp_path: Path, minutes: int) -> None:
    short, long = tmp_path / "short.wav", tmp_path / "long.wav"
    short.write_bytes(wav(join([clip(name) for name in NAMES[:5]], PAUSES)))
    lap, _ = recital(2, PAUSES)
    laps = -(-minutes * 60 * 16_000 // len(lap))
    long.write_bytes(wav(recital(2 * laps, PAUSES)[0]))
    with serving() as server:
        server.http.timeout = 1500
        stream(server, short)
        worker = server.worker_pid()
        before = peak_mib(worker)
        heard = stream(server, long)
        growth = peak_mib(worker) - before
        assert server.worker_pid() == worker
        alone = {name: server.transcribe(DATA / f"{name}.wav").json()["text"] for name in NAMES}
    order = list(NAMES) * 2 * laps
    lost = lost_at_joins(order, heard.text, alone)
    print(
        f"{minutes} min: first delta {heard.first_delta_s:.2f} s, growth {growth:.0f} MiB, {heard.deltas} deltas, "
        f"{lost} words lost at {len(order)} joins"
    )
    assert missing(order, heard.text) == []
    assert lost <= LOST_SHARE * 2 * EDGE * len(order)
    assert words(heard.text)[-4:] == words(transcripts()[NAMES[-1]])[-4:], "cut off at the end"
    assert heard.first_delta_s <= FIRST_DELTA_SECONDS * GUARD
    assert growth <= GROWTH_MIB


def on_the_grid(name: str, pause: float) -> Audio:
    """A clip with a pause behind it, so long that the next begins at a word of the scripted engine."""
    audio = np.concatenate([clip(name), silence(pause)])
    return np.concatenate([audio, np.zeros(-len(audio) % GRID, np.float32)])


def clock(text: str) -> list[int]:
    """Places of the words of the scripted engine, samples."""
    return [int(word.removeprefix("s")) * 16 for word in text.split()]


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(4, marks=pytest.mark.timeout(240)),
        pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_every_moment_of_a_long_file_is_heard_once(tmp_path: Path, minutes: int) -> None:
    """Each word of the scripted engine belongs to one sample: one that is missing or doubled is sound that is."""
    path = tmp_path / "long.wav"
    with serving(model="scripted") as server:
        server.http.timeout = 1500
        alone = {}
        for name in NAMES:
            path.write_bytes(wav(on_the_grid(name, PAUSES[-1])))
            # The first and the last may stand in the padding around speech, which is less where other speech is near.
            alone[name] = clock(server.transcribe(path).json()["text"])[1:-1]
        worker = server.worker_pid()
        before = peak_mib(worker)
        parts, starts, at = [], [], 0
        order: list[str] = []
        while at < minutes * 60 * 16_000:
            order.append(NAMES[len(order) % len(NAMES)])
            parts.append(on_the_grid(order[-1], PAUSES[len(order) % len(PAUSES)]))
            starts.append(at)
            at += len(parts[-1])
        path.write_bytes(wav(np.concatenate(parts)))
        heard = clock(stream(server, path).text)
        growth = peak_mib(worker) - before
    assert all(one < other for one, other in pairwise(heard)), "doubled, or out of order"
    there = set(heard)
    lost = [
        (name, start + place)
        for name, start in zip(order, starts, strict=True)
        for place in alone[name]
        if start + place not in there
    ]
    print(f"{minutes} min: {len(heard)} words, {len(lost)} lost at {len(order)} joins, growth {growth:.0f} MiB")
    assert lost == []
    assert growth <= GROWTH_MIB
