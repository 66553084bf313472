"""The OpenAI Realtime dialect under any order of any messages, and against a worker that keeps its own order."""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams.dialect import Audio, Clear, Effect, EndUtterance, Update
from shared.errors import EngineFailed, NapscribeError, TooManyStreams
from shared.streams import (
    AudioCleared,
    Parked,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamEvent,
    UtteranceDelta,
    UtteranceEnded,
)
from tests.unit.test_openai_realtime import COMPLETED, DELTA, Client, final

# ---------------------------------------------------------------- any order of anything

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["audio", "input", "format", "type", "rate", "transcription", "language", "languages", "keywords", "model",
         "turn_detection", "threshold", "silence_duration_ms", "prefix_padding_ms", "eagerness", "include", "prompt",
         "input_audio_format", "input_audio_transcription"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
client_messages = st.one_of(
    st.text(max_size=20),
    st.binary(max_size=20),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                [
                    "session.update",
                    "transcription_session.update",
                    "input_audio_buffer.append",
                    "input_audio_buffer.commit",
                    "input_audio_buffer.clear",
                    "response.create",
                ]
            )
            | json_values
        },
        optional={
            "session": json_values,
            "audio": json_values | st.binary(max_size=9).map(lambda data: base64.b64encode(data).decode()),
            "event_id": json_values,
        },
    ).map(json.dumps),
)
numbers, samples = st.integers(-1, 4), st.integers(0, 10**6)
texts = st.text(max_size=6)
stream_events = st.one_of(
    st.builds(SpeechStarted, st.just(1), st.just("s"), numbers, samples),
    st.builds(SpeechStopped, st.just(1), st.just("s"), numbers, samples),
    st.builds(Partial, st.just(1), st.just("s"), numbers, samples, texts),
    st.builds(UtteranceDelta, st.just(1), st.just("s"), numbers, samples, texts),
    st.builds(final, numbers, texts, samples, samples),
    st.builds(UtteranceEnded, st.just(1), st.just("s"), numbers, numbers),
    st.builds(AudioCleared, st.just(1), st.just("s"), numbers, samples),
    st.builds(Parked, st.just(1), st.just("s"), samples),
    st.builds(StreamDone, st.just(1), st.just("s"), samples),
)
anything = st.lists(
    st.one_of(client_messages, stream_events, st.sampled_from([EngineFailed("x"), TooManyStreams("y")])), max_size=30
)


@given(anything)
@settings(max_examples=150, deadline=None)
def test_any_order_of_any_messages_ends_in_a_typed_answer(happenings: list[Any]) -> None:
    client = Client()
    for happening in happenings:
        if isinstance(happening, str | bytes):
            client.raw(happening)
        elif isinstance(happening, NapscribeError):
            client.fail(happening)
        else:
            client.event(happening)
    client.door.silent()
    assert isinstance(client.door.left(), Sequence)
    assert all(isinstance(message["type"], str) for message in client.heard)
    assert len({message["event_id"] for message in client.heard}) == len(client.heard)
    committed = [m["item_id"] for m in client.heard if m["type"] == "input_audio_buffer.committed"]
    completed = [m["item_id"] for m in client.heard if m["type"] == COMPLETED]
    assert len(set(committed)) == len(committed)
    assert len(set(completed)) == len(completed)
    assert set(completed) <= set(committed)


# ---------------------------------------------------------------- against a worker that keeps the rules

WORD = 3_200
"""Samples of a word of the simulated stream: bytes are words, in order, each said once."""


@dataclass
class Worker:
    """The order of a real worker's events: the ears speak for themselves and run ahead; finals and answers queue behind
    each other; a clear jumps that queue. Every step is chosen from outside."""

    automatic: bool
    inbox: collections.deque[Effect] = field(default_factory=collections.deque)
    out: list[StreamEvent] = field(default_factory=list)
    told: collections.deque[Any] = field(default_factory=collections.deque)
    """From the ears to the scheduler."""
    owed: list[Any] = field(default_factory=list)
    position: int = 0
    floor: int = 0
    number: int = -1
    token: int = 0
    speaking: bool = False
    words: dict[int, str] = field(default_factory=dict)
    spans: dict[int, int] = field(default_factory=dict)
    said: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)

    def hear(self) -> None:
        """The ears take the next thing."""
        if not self.inbox:
            return
        match self.inbox.popleft():
            case Audio(data=data):
                self._audio(data.decode())
            case EndUtterance():
                self.token += 1
                number = self.number if self.speaking else -1
                self._stop()
                self.told.append(UtteranceEnded(1, "s", self.token, number))
            case Clear():
                number = self.number if self.speaking else -1
                self.speaking, self.floor = False, self.position
                self.told.append(AudioCleared(1, "s", number, self.position))
            case Update(options=options):
                self.automatic = options.endpointing.automatic

    def _audio(self, word: str) -> None:
        self.position += WORD
        if word == "-":  # a pause
            if self.automatic:
                self._stop()
            return
        if word == "/":  # the utterance is too long
            self._stop()
            return
        if not self.speaking:
            self.speaking, self.number = True, self.number + 1
            self.words[self.number], self.said[self.number] = "", ""
            self.spans[self.number] = max(self.floor, self.position - 3 * WORD)
            self.out.append(SpeechStarted(1, "s", self.number, self.spans[self.number]))
            self.told.append(self.number)
        self.words[self.number] += (" " if self.words[self.number] else "") + word

    def _stop(self) -> None:
        if self.speaking:
            self.speaking, self.floor = False, self.position - WORD
            self.ended.add(self.number)
            self.out.append(SpeechStopped(1, "s", self.number, self.position))

    def schedule(self) -> None:
        while self.told:
            happening = self.told.popleft()
            if isinstance(happening, AudioCleared):
                self.owed = [owed for owed in self.owed if owed != happening.utterance]
                self.out.append(happening)
            else:
                self.owed.append(happening)
        self._pay()

    def decode(self, pick: int) -> None:
        """A hypothesis of one open utterance, whichever."""
        heard = [number for number in self.owed if isinstance(number, int) and number not in self.finished]
        if heard:
            number = heard[pick % len(heard)]
            words, said = self.words[number].split(" "), self.said[number].split()
            certain = " ".join(words[: max(len(said), len(words) - 1)])
            self._delta(number, certain)

    def finish(self, pick: int) -> None:
        ready = [n for n in self.owed if isinstance(n, int) and n in self.ended and n not in self.finished]
        if ready:
            self.finished.add(ready[pick % len(ready)])
            self._pay()

    def _delta(self, number: int, text: str) -> None:
        new, self.said[number] = text[len(self.said[number]) :], text
        if new:
            self.out.append(UtteranceDelta(1, "s", number, 0, new))

    def _pay(self) -> None:
        while self.owed and (not isinstance(self.owed[0], int) or self.owed[0] in self.finished):
            head = self.owed.pop(0)
            if isinstance(head, int):
                self._delta(head, self.words[head])
                self.out.append(final(head, self.words[head], self.spans[head], self.spans[head] + WORD))
            else:
                self.out.append(head)

    def busy(self) -> bool:
        return bool(self.inbox or self.told or self.owed)


steps = st.lists(
    st.sampled_from(["word", "word", "word", "pause", "cut", "cut", "commit", "clear", "auto", "manual"])
    | st.sampled_from(["hear", "hear", "hear", "schedule", "schedule"])
    | st.tuples(st.sampled_from(["decode", "finish"]), st.integers(0, 3)),
    min_size=20,
    max_size=80,
)


class Talk:
    """A client, a worker that keeps the rules, and what must come of it."""

    def __init__(self, automatic: bool) -> None:
        self.client = Client()
        if not automatic:
            self.client.update(turn_detection=None)
        self.client.done.clear()
        self.worker = Worker(automatic)
        self.count = 0
        self.said: list[str] = []
        self.since: list[str] = []
        """Words since the last commit or clear."""
        self.commits: list[str] = []

    def step(self, step: Any) -> None:
        match step:
            case "word":
                self.count += 1
                word = f"w{self.count}"
                self.since.append(word)
                self.client.append(word.encode())
            case "pause" | "cut":
                self.client.append(b"-" if step == "pause" else b"/")
            case "commit":
                self.commits.append(" ".join(self.since))
                self.said += self.since
                self.since = []
                self.client.commit()
            case "clear":
                self.since = []
                self.client.send("input_audio_buffer.clear")
            case "auto" | "manual":
                self.client.update(turn_detection={"type": "server_vad"} if step == "auto" else None)
            case "hear":
                self.worker.hear()
            case "schedule":
                self.worker.schedule()
            case ("decode", pick):
                self.worker.decode(pick)
            case ("finish", pick):
                self.worker.finish(pick)
        self._exchange()

    def _exchange(self) -> None:
        self.worker.inbox.extend(self.client.done)
        self.client.done.clear()
        for event in self.worker.out:
            self.client.event(event)
        self.worker.out.clear()

    def drain(self) -> None:
        self.step("commit")
        while self.worker.busy():
            for step in ("hear", "schedule", ("finish", 0)):
                self.step(step)

    def completed(self) -> list[dict[str, Any]]:
        return [message for message in self.client.heard if message["type"] == COMPLETED]

    def check(self) -> None:
        """What holds in any mode: no errors, one completion per item, deltas that add up to it."""
        heard = self.client.heard
        assert not [message for message in heard if message["type"] == "error"]
        committed = [m["item_id"] for m in heard if m["type"] == "input_audio_buffer.committed"]
        assert sorted(committed) == sorted(m["item_id"] for m in self.completed())
        for message in self.completed():
            deltas = [m["delta"] for m in heard if m["type"] == DELTA and m["item_id"] == message["item_id"]]
            assert "".join(deltas) == message["transcript"]
        for item in committed:
            order = [m["type"] for m in heard if m.get("item_id") == item]
            assert order[-1] == COMPLETED
            assert order.index("input_audio_buffer.committed") < order.index(COMPLETED)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_manual_commits_get_exactly_their_words(chosen: list[Any]) -> None:
    talk = Talk(automatic=False)
    for step in chosen:
        if step not in ("auto", "manual"):
            talk.step(step)
    talk.drain()
    talk.check()
    assert [message["transcript"] for message in talk.completed()] == talk.commits


@given(steps)
@settings(max_examples=60, deadline=None)
def test_automatic_turns_lose_nothing_that_was_not_cleared(chosen: list[Any]) -> None:
    talk = Talk(automatic=True)
    for step in chosen:
        if step not in ("auto", "manual", "clear"):
            talk.step(step)
    talk.drain()
    talk.check()
    texts = [message["transcript"] for message in talk.completed()]
    assert " ".join(texts).split() == talk.said


@given(steps)
@settings(max_examples=80, deadline=None)
def test_a_change_of_mode_loses_and_doubles_nothing(chosen: list[Any]) -> None:
    talk = Talk(automatic=True)
    for step in chosen:
        if step != "clear":
            talk.step(step)
    talk.drain()
    talk.step("manual")
    talk.drain()
    talk.check()
    words = " ".join(message["transcript"] for message in talk.completed()).split()
    assert sorted(words) == sorted(talk.said)
