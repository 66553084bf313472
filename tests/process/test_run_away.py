"""A run-away is told to whoever reads the text, at every door: it is not returned as if it were whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking
from tests.server import Server, events_of, serving
from tests.speech import DATA, clip

CLIP = DATA / "librivox-0880.wav"


@pytest.fixture(scope="module")
def latency_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latency") / "log"


@pytest.fixture(scope="module")
def server(latency_log: Path) -> Iterator[Server]:
    with serving(model="scripted:runaway=word", latency_log=latency_log) as running:
        yield running


@pytest.mark.parametrize("kind", ["word", "junk"])
@pytest.mark.parametrize("prefix", [0, 1], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("name", ["librivox-0880", "jfk"], ids=["short", "long"])
async def test_what_was_said_stays(kind: str, prefix: int, name: str) -> None:
    """In a segment that is cut in two, and in one that is too short for it. (In calls only an engine that keeps a prefix says for
    good; of another the final is the truth.)"""
    with serving(model=f"scripted:runaway={kind},prefix={prefix}") as server:
        *deltas, done = events_of(server.transcribe(DATA / f"{name}.wav", stream="true").text)
        assert "".join(event["delta"] for event in deltas) == done["text"]
        if not prefix:
            return
        async with talking(server) as talk:
            await talk.socket.send(s16(clip(name)))
            await talk.close()
    assert talk.of("final")
    for final in talk.of("final"):
        said = [event["text"] for event in talk.of("delta") if event["utterance"] == final["utterance"]]
        assert "".join(said) == final["text"]


@pytest.fixture(scope="module")
def whole() -> Iterator[Server]:
    with serving(model="scripted") as running:
        yield running


def test_files(server: Server, whole: Server) -> None:
    assert server.transcribe(CLIP).json()["finish_reason"] == "repetition"
    answer = server.transcribe(CLIP, response_format="verbose_json").json()
    assert answer["finish_reason"] == "repetition"
    assert {segment["finish_reason"] for segment in answer["segments"]} == {"repetition"}
    *deltas, done = events_of(server.transcribe(CLIP, stream="true").text)
    assert done["finish_reason"] == "repetition"
    assert "".join(event["delta"] for event in deltas) == done["text"]
    assert "finish_reason" not in whole.transcribe(CLIP).json()
    answer = whole.transcribe(CLIP, response_format="verbose_json").json()
    assert {segment["finish_reason"] for segment in answer["segments"]} == {"stop"}
    assert "finish_reason" not in answer
    assert "finish_reason" not in events_of(whole.transcribe(CLIP, stream="true").text)[-1]


async def test_calls(server: Server, whole: Server, latency_log: Path) -> None:
    for each, reason in ((server, "repetition"), (whole, "stop")):
        async with talking(each) as talk:
            await talk.socket.send(s16(clip("librivox-0880")))
            await talk.close()
        assert [final["finish_reason"] for final in talk.of("final")] == [reason]
    (line,) = latency_log.read_text().splitlines()
    assert json.loads(line)["finish_reason"] == "repetition"


async def test_estimated_times_of_a_call_are_marked() -> None:
    with serving() as server:
        async with talking(server, "words=1") as talk:
            await talk.socket.send(s16(clip("librivox-0880")))
            await talk.close()
    (final,) = talk.of("final")
    assert final["words"]
    assert final["timing"] == "estimated"
