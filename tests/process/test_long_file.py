"""Long recordings: every sentence is there, memory does not grow with the length, and the first words come soon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer
import pytest

from tests.process.fakes import GUARD
from tests.server import Server, events_of, serving
from tests.speech import NAMES, clip, join, recital, transcripts, wav, words

FIRST_DELTA_SECONDS = 3.0
GROWTH_MIB = 150
"""Of the worker's memory from a file of half a minute to any other."""
PAUSES = (0.4, 1.1, 0.7, 2.5)
"""Seconds before each sentence, in turn; against six sentences in turn, each has every pause in front of it."""
FOUND = 0.6
"""Share of a sentence's words that must be right for it to count as there."""


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


def missing(order: Sequence[str], heard: str) -> list[tuple[int, str]]:
    """Place and name of each sentence that was said and is not in the text, by alignment of the whole."""
    said = [words(transcripts()[name]) for name in order]
    aligned = jiwer.process_words(" ".join(word for sentence in said for word in sentence), " ".join(words(heard)))
    right: set[int] = set()
    for chunk in aligned.alignments[0]:
        if chunk.type == "equal":
            right.update(range(chunk.ref_start_idx, chunk.ref_end_idx))
    lost, start = [], 0
    for place, sentence in enumerate(said):
        end = start + len(sentence)
        if len(right & set(range(start, end))) < FOUND * len(sentence):
            lost.append((place, order[place]))
        start = end
    return lost


def test_missing_finds_what_is_missing() -> None:
    order = list(NAMES) * 3
    text = " ".join(transcripts()[name] for name in order)
    assert missing(order, text) == []
    assert missing(order, text.removesuffix(transcripts()[order[-1]])) == [(len(order) - 1, order[-1])]
    without_one = " ".join(transcripts()[name] for place, name in enumerate(order) if place != 7)
    assert missing(order, without_one) == [(7, order[7])]


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(4, marks=pytest.mark.timeout(240)),
        pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
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
    print(f"{minutes} min: first delta {heard.first_delta_s:.2f} s, growth {growth:.0f} MiB, {heard.deltas} deltas")
    assert missing(list(NAMES) * 2 * laps, heard.text) == []
    assert words(heard.text)[-4:] == words(transcripts()[NAMES[-1]])[-4:], "cut off at the end"
    assert heard.first_delta_s <= FIRST_DELTA_SECONDS * GUARD
    assert growth <= GROWTH_MIB
