"""From the utterances of a stream to the items of an OpenAI Realtime session, and the messages that tell of them.

Where the server decides about turns, an utterance is an item, committed when its speech stops. Where the client commits,
all utterances between two commits are one item; which commit an utterance belongs to follows from the order of the
stream's events: its final comes before the answer to its commit and after the answer to the one before.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.answers.errors_http import envelope
from gateway.answers.transcript import joined_scores
from shared.errors import NapscribeError
from shared.pcm import SAMPLE_RATE, seconds
from shared.scripts import separator
from shared.streams import UtteranceFinal

Message = dict[str, Any]
"""An event for the client, without its ``event_id``."""

_TRANSCRIPTION = "conversation.item.input_audio_transcription."


@dataclass(slots=True)
class _Item:
    id: str
    clears: int = 0
    """Clears asked for before any audio of this item came."""
    floor: int = 0
    """Samples: an utterance that began earlier has been cleared."""
    announced: bool = False
    """The client knows that it is committed."""
    text: str = ""
    tail: str = ""
    """Last character of the deltas."""
    duration: float = 0.0
    languages: dict[str, None] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)

    def add(self, final: UtteranceFinal) -> None:
        self.logprobs += joined_scores(self.text, final.logprobs)
        self.text += separator(self.text, final.text) + final.text
        self.duration += seconds(max(0, final.end_sample - final.start_sample))
        if final.language and final.text:
            self.languages[final.language] = None


@dataclass(slots=True)
class _Utterance:
    start: int
    item: _Item | None
    """Its own; None: it belongs to what the client commits."""
    commits: int
    """Commits sent when it was first heard of: it belongs to a later one, or to one that is not answered yet."""
    held: str = ""
    """Deltas that cannot be said yet."""
    begun: bool = False
    """A delta has been said."""


class Turns:
    """One session. Every method returns what the client is told, in order."""

    def __init__(self, automatic: bool, beta: bool, new_id: Callable[[str], str]) -> None:
        """``automatic``: the server decides. ``new_id(kind)`` gives a fresh id."""
        self.beta = beta
        """Speak of new items as beta does."""
        self._automatic = automatic
        self._new_id = new_id
        self._commits = self._answered = 0
        self._clears = self._cleared = 0
        self._utterances: dict[int, _Utterance] = {}
        self._queue = collections.deque([self._item()])
        """Items of the commits that are not answered, and last the one that the next commit will close."""
        self._previous: str | None = None

    # ------------------------------------------------------------ what the client does

    def commit(self) -> list[Message]:
        """``EndUtterance`` is sent with it. Where the server decides, only its answer shows whether there is an item."""
        self._commits += 1
        item = self._queue[-1]
        self._queue.append(self._item())
        return [] if self._automatic else self._announce(item)

    def clear(self) -> None:
        """``ClearAudio`` is sent with it."""
        self._clears += 1
        self._queue[-1] = self._item()

    @property
    def uncommitted(self) -> bool:
        """Something has been said that only a commit of the client would make an item of."""
        loose = any(u.item is None and u.commits == self._commits for u in self._utterances.values())
        return loose or bool(self._queue[-1].text)

    def decide(self, automatic: bool) -> None:
        """Who decides about turns from now on. The client commits what is ``uncommitted`` before the server decides."""
        settled = self._commits == self._answered and self._clears == self._cleared
        if self._automatic and not automatic and settled:
            for utterance in self._utterances.values():
                if utterance.item is not None and not utterance.item.announced:
                    self._queue[-1], utterance.item = utterance.item, None
        self._automatic = automatic

    # ------------------------------------------------------------ what the stream says

    def speech_started(self, number: int, sample: int) -> list[Message]:
        utterance = self._meet(number, sample)
        if utterance.item is None:
            return []
        return [{**_speech("started", audio_start_ms=_ms(sample)), "item_id": utterance.item.id}]

    def speech_stopped(self, number: int, sample: int) -> list[Message]:
        utterance = self._utterances.get(number)
        if utterance is None or utterance.item is None or utterance.item.announced:
            return []
        stopped = {**_speech("stopped", audio_end_ms=_ms(sample)), "item_id": utterance.item.id}
        return [stopped, *self._announce(utterance.item)]

    def delta(self, number: int, text: str) -> list[Message]:
        utterance = self._meet(number, 0)
        if utterance.item is not None:
            return [self._delta(utterance, utterance.item, text)]
        utterance.held += text
        return self._flow()

    def final(self, final: UtteranceFinal) -> list[Message]:
        utterance = self._meet(final.utterance, final.start_sample)
        del self._utterances[final.utterance]
        if utterance.item is not None:
            utterance.item.add(final)
            return self._finish(utterance.item)
        item = self._queue[0]
        if self._is_cleared(utterance, item):
            return self._flow()
        rest = [self._delta(utterance, item, utterance.held)] if utterance.held else []
        item.add(final)
        return rest + self._flow()

    def ended(self, utterance: int) -> list[Message]:
        """The oldest commit is answered; ``utterance`` is the one that it ended, -1 for none."""
        if self._commits == self._answered:
            return []
        self._answered += 1
        item = self._queue.popleft()
        own = utterance >= 0 and not item.text and not item.announced
        return ([] if own else self._finish(item)) + self._flow()

    def audio_cleared(self, number: int, through: int) -> list[Message]:
        self._cleared += 1
        self._utterances.pop(number, None)
        for item in self._queue:
            if item.clears >= self._cleared:
                item.floor = max(item.floor, through)
        return [{"type": "input_audio_buffer.cleared"}, *self._flow()]

    def fail(self, error: NapscribeError) -> list[Message]:
        """Every committed item that will never be completed."""
        own = [utterance.item for utterance in self._utterances.values() if utterance.item is not None]
        reason = {**envelope(error)["error"]}
        return [
            {"type": f"{_TRANSCRIPTION}failed", "item_id": item.id, "content_index": 0, "error": reason}
            for item in (*own, *self._queue)
            if item.announced
        ]

    # ------------------------------------------------------------ inside

    def _item(self) -> _Item:
        return _Item(self._new_id("item"), clears=self._clears)

    def _meet(self, number: int, start: int) -> _Utterance:
        known = self._utterances.get(number)
        if known is None:
            own = self._item() if self._automatic else None
            known = self._utterances[number] = _Utterance(start, own, self._commits)
        return known

    def _flow(self) -> list[Message]:
        """Say the held deltas of the oldest open utterance, if it is certain which item they belong to."""
        utterance = next((u for u in self._utterances.values() if u.item is None), None)
        if utterance is None or not utterance.held or utterance.commits > self._answered:
            return []
        held, utterance.held = utterance.held, ""
        item = self._queue[0]
        return [] if self._is_cleared(utterance, item) else [self._delta(utterance, item, held)]

    def _is_cleared(self, utterance: _Utterance, item: _Item) -> bool:
        """A clear is obeyed at once, so what comes before its answer and after nothing else is of before the clear."""
        return item.clears > self._cleared or utterance.start < item.floor

    @staticmethod
    def _delta(utterance: _Utterance, item: _Item, text: str) -> Message:
        piece = text if utterance.begun else separator(item.tail, text) + text
        utterance.begun = True
        item.tail = piece[-1:] or item.tail
        return {"type": f"{_TRANSCRIPTION}delta", "item_id": item.id, "content_index": 0, "delta": piece}

    def _announce(self, item: _Item) -> list[Message]:
        item.announced = True
        place = {"previous_item_id": self._previous}
        self._previous = item.id
        content = [{"type": "input_audio", "transcript": None}]
        body = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": content,
        }
        names = ("created",) if self.beta else ("added", "done")
        return [
            {"type": "input_audio_buffer.committed", **place, "item_id": item.id},
            *({"type": f"conversation.item.{name}", **place, "item": body} for name in names),
        ]

    def _finish(self, item: _Item) -> list[Message]:
        completed: Message = {
            "type": f"{_TRANSCRIPTION}completed",
            "item_id": item.id,
            "content_index": 0,
            "transcript": item.text,
            "usage": {"type": "duration", "seconds": round(item.duration, 3)},
        }
        if item.languages:
            completed["languages"] = [{"code": code} for code in item.languages]
        if item.logprobs:
            completed["logprobs"] = [
                {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}
                for token, value in item.logprobs
            ]
        return [*([] if item.announced else self._announce(item)), completed]


def _speech(what: str, **when: int) -> Message:
    return {"type": f"input_audio_buffer.speech_{what}", **when}


def _ms(sample: int) -> int:
    return sample * 1000 // SAMPLE_RATE
