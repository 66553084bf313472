"""Anything that can happen to a dialect, in any order, and what must hold whatever happens.

``steps`` draws what clients and streams may do; ``Line`` acts it out on a dialect and checks every answer; ``answered`` is a
stream that does what a real one does with the commands it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from gateway.streams.dialect import Audio, Clear, Dialect, Effect, EndUtterance, Finish, Hang, Open, Say, Update
from shared.errors import BY_CODE, from_code
from shared.streams import (
    AudioCleared,
    Parked,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamEvent,
    StreamProgress,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
    UtteranceTimings,
)
from shared.wire import Word

Step = tuple[str, Any]

_numbers = st.integers(0, 3)
_samples = st.integers(0, 10**10)
_texts = st.text(max_size=30)
_words = st.lists(st.builds(Word, _texts, st.floats(0, 1e6), st.floats(0, 1e6)), max_size=3).map(tuple)

events: st.SearchStrategy[StreamEvent] = st.one_of(
    st.builds(StreamProgress, st.just(1), st.just("s"), _samples, _samples),
    st.builds(SpeechStarted, st.just(1), st.just("s"), _numbers, _samples),
    st.builds(SpeechStopped, st.just(1), st.just("s"), _numbers, _samples),
    st.builds(Partial, st.just(1), st.just("s"), _numbers, _samples, _texts),
    st.builds(UtteranceDelta, st.just(1), st.just("s"), _numbers, _samples, _texts),
    st.builds(
        UtteranceFinal,
        generation=st.just(1),
        request_id=st.just("s"),
        utterance=_numbers,
        start_sample=_samples,
        end_sample=_samples,
        through_sample=_samples,
        text=_texts,
        words=_words,
        language=st.sampled_from(["", "en", "yue"]),
        avg_logprob=st.none() | st.floats(-50, 5),
        cause=st.sampled_from(["silence", "length", "request", "close"]),
        revised=st.floats(0, 1),
        timings=st.builds(UtteranceTimings, speech_end_ns=st.integers(0, 10**15)),
    ),
    st.builds(UtteranceEnded, st.just(1), st.just("s"), st.integers(0, 5), st.integers(-1, 3)),
    st.builds(AudioCleared, st.just(1), st.just("s"), st.integers(-1, 3), _samples),
    st.builds(Parked, st.just(1), st.just("s"), _samples),
    st.builds(StreamDone, st.just(1), st.just("s"), _samples),
)

errors = st.builds(from_code, st.sampled_from(sorted(BY_CODE)), _texts, hint=_texts)

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)


objects = st.dictionaries(_texts, _json, max_size=3)
"""Anything that a JSON object may hold."""


def messages(controls: Sequence[dict[str, Any]]) -> st.SearchStrategy[str | bytes]:
    """Audio, the dialect's own controls, and everything that looks like one or does not."""
    known = st.sampled_from(controls).map(json.dumps)
    types = st.sampled_from([control["type"] for control in controls])
    bent = st.builds(
        lambda kind, more: json.dumps({**more, "type": kind}), types, st.dictionaries(_texts, _json, max_size=2)
    )
    nested = st.integers(0, 2000).map(lambda depth: "[" * depth)
    return st.one_of(known, known, bent, _json.map(json.dumps), _texts, nested, st.binary(max_size=50))


def steps(controls: Sequence[dict[str, Any]]) -> st.SearchStrategy[list[Step]]:
    """Sequences of (what happens, with what)."""
    step: st.SearchStrategy[Step] = st.one_of(
        messages(controls).map(lambda message: ("receive", message)),
        events.map(lambda event: ("event", event)),
        errors.map(lambda error: ("failed", error)),
        st.just(("silent", None)),
        st.just(("left", None)),
    )
    return st.lists(step, max_size=25)


class Line:
    """A connection without a socket. ``said`` is what the client has been told, decoded."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.said: list[dict[str, Any]] = []
        self.effects: list[Effect] = []
        self.closed: Hang | None = None
        self.gone = False
        self.take(dialect.begin())

    def take(self, effects: Iterable[Effect]) -> list[Effect]:
        """Check and keep what the dialect wants done; returns the same."""
        taken = list(effects)
        for effect in taken:
            assert isinstance(effect, Open | Audio | Update | EndUtterance | Clear | Finish | Say | Hang), effect
            assert self.closed is None, "nothing follows a close"
            if isinstance(effect, Say):
                assert not self.gone, "said to a client that has left"
                message = json.loads(effect.text)
                assert isinstance(message["type"], str)
                self.said.append(message)
            elif isinstance(effect, Hang):
                assert effect.code in range(1000, 1015)
                assert len(effect.reason.encode()) <= 123
                self.closed = effect
        self.effects += taken
        return taken

    def act(self, step: Step) -> list[Effect]:
        kind, what = step
        match kind:
            case "receive":
                return self.take(self.dialect.receive(what))
            case "event":
                return self.take(self.dialect.event(what, 0))
            case "failed":
                return self.take(self.dialect.failed(what, 0))
            case "silent":
                return self.take(self.dialect.silent())
        effects = self.take(self.dialect.left())
        self.gone = True
        return effects

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.said if message["type"] == kind]


def check_any_order(dialect: Dialect, sequence: Iterable[Step]) -> Line:
    """Whatever happens, the answers are well-formed, and a text message is never met with silence while the line is open."""
    line = Line(dialect)
    for step in sequence:
        open_before = line.closed is None and not line.gone
        effects = line.act(step)
        if step[0] == "failed" and open_before:
            assert line.closed is not None
        if not open_before:
            assert not any(isinstance(effect, Say | Hang | Audio) for effect in effects)
    return line


def answered(line: Line, sequence: Iterable[Step], on_audio: Callable[[bytes], None] | None = None) -> Line:
    """Act messages out in front of a stream that answers every command, until it is done."""
    token = 0
    for step in sequence:
        for effect in line.act(step):
            match effect:
                case EndUtterance():
                    token += 1
                    line.act(("event", UtteranceEnded(1, "s", token, -1)))
                case Clear():
                    line.act(("event", AudioCleared(1, "s", -1, 0)))
                case Finish():
                    line.act(("event", StreamDone(1, "s", 0)))
                case Audio(data=data) if on_audio is not None:
                    on_audio(data)
    return line
