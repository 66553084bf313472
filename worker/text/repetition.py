"""Runs in text: what a speech model says when it loses itself ("the the the the …", "ааааа", "thank you. thank you. …").

Three tools, all linear in the length of what they read:

- ``collapse_repetitions`` shortens runs of characters, with the thresholds that Qwen3-ASR's own post-processing publishes
  (``detect_and_fix_repetitions`` of its SDK): one character more than 20 times, a pattern of 2 to 20 characters at least
  20 times. Any script; no recursion, where the published code recurses once a run.
- ``collapse_word_runs`` does the same for words, where a phrase of ten words need not come twenty times to be a run-away.
- ``RunDetector`` sees tokens or words one by one and says how the tail repeats, for loops that must stop and for streams
  that must hold a word back.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MAX_PERIOD = 20
"""Longest pattern that is looked for: characters, words or tokens."""
CHAR_REPEATS = 20
"""A pattern of characters this often is a run; a single character must come once more (published thresholds)."""
RUN_ITEMS = 20
"""Words or tokens that a run-away has at least. Nobody says "no" twenty times, and a chorus of one word is shorter."""
RUN_REPEATS = 6
"""… and how often its pattern comes at least, however long the pattern: a chanted line comes four or five times."""

_WORD = re.compile(r"\S+\s*")


def collapse_repetitions(text: str, threshold: int = CHAR_REPEATS) -> str:
    """The text with each run of characters cut to its first copy; a partial copy at the end of a run stays.

    A run is one character more than ``threshold`` times or, looked for after those are gone, a pattern of 2 to 20 characters
    at least ``threshold`` times. Text without a run comes back as it was, and so does the result: this is idempotent.
    """
    return _at(text, _places_without_repetitions(text, threshold))


def collapse_word_runs(text: str) -> str:
    """The text with each run of words cut to its first copy, by the thresholds of ``RunDetector``.

    Words are separated by white space and compared without case and punctuation. When a run lasts to the end of the text,
    the partial copy that ends it goes too: it is where a budget cut the run-away. Other text comes back as it was.
    """
    return _at(text, _places_without_word_runs(text))


def places_without_repetitions(text: str, places: Sequence[int]) -> Sequence[int]:
    """Those of ``places`` whose characters ``collapse_repetitions`` leaves, without white space at the ends."""
    left = _at(text, places)
    kept = _places_without_repetitions(left, CHAR_REPEATS)
    left = _at(left, kept)
    lead = len(left) - len(left.lstrip())
    return [places[place] for place in kept[lead : max(lead, len(left.rstrip()))]]


def places_without_word_runs(text: str, places: Sequence[int]) -> Sequence[int]:
    """The same of ``collapse_word_runs``, after ``collapse_repetitions``."""
    few = places_without_repetitions(text, places)
    return [few[place] for place in _places_without_word_runs(_at(text, few))]


def _at(text: str, places: Sequence[int]) -> str:
    return text if len(places) == len(text) else "".join(text[place] for place in places)


def _places_without_repetitions(text: str, threshold: int) -> Sequence[int]:
    if threshold < 2:
        raise ValueError(f"A threshold of {threshold} would cut what is said twice.")
    if len(text) <= threshold:
        return range(len(text))
    places: list[int] = []
    end = 0
    for run in re.finditer(rf"(.)\1{{{threshold},}}", text, flags=re.DOTALL):
        places += range(end, run.start() + 1)
        end = run.end()
    places += range(end, len(text))
    kept = _collapse(_at(text, places), [0, len(text) + 1] + [threshold] * (MAX_PERIOD - 1))
    return places if len(kept) == len(places) else [places[index] for index in kept]


def _places_without_word_runs(text: str) -> Sequence[int]:
    words = [match.span() for match in _WORD.finditer(text)]
    if len(words) < RUN_ITEMS:
        return range(len(text))
    keys = [_word_key(text[start:stop]) for start, stop in words]
    kept = _collapse(keys, [0] + [repeats_of_runaway(period) for period in range(1, MAX_PERIOD + 1)], drop_tail=True)
    if len(kept) == len(words):
        return range(len(text))
    places = [*range(words[0][0]), *(place for index in kept for place in range(*words[index]))]
    while text[places[-1]].isspace():
        places.pop()
    return places


def repeats_of_runaway(period: int) -> int:
    """How often a pattern of ``period`` words or tokens comes before it is a run-away."""
    return max(RUN_REPEATS, -(-RUN_ITEMS // period))


@dataclass(frozen=True, slots=True)
class Run:
    """How the end of a sequence repeats itself."""

    period: int
    """Items of the pattern."""
    repeats: int
    """Whole copies of it, at least 2."""
    length: int
    """Items of the run, a partial copy at its start included."""

    @property
    def runaway(self) -> bool:
        return self.repeats >= repeats_of_runaway(self.period)


class RunDetector:
    """Watches a sequence item by item (token ids, words) for a tail that repeats itself.

    Each ``push`` costs the same (``max_period`` comparisons), and nothing but the last ``max_period`` items is kept.
    """

    def __init__(self, items: Iterable[Hashable] = (), *, max_period: int = MAX_PERIOD) -> None:
        self._recent: deque[Hashable] = deque(maxlen=max_period)
        self._matches = [0] * (max_period + 1)
        """For each period, how many items up to now are equal to the one that long before them."""
        for item in items:
            self.push(item)

    def push(self, item: Hashable) -> Run | None:
        """Take one item; the run that now ends the sequence, or None. Of several periods the shortest counts, but a
        run-away counts before a run that is not one."""
        self._count(item)
        self._recent.append(item)
        return self.tail

    @property
    def tail(self) -> Run | None:
        """The run that ends the sequence: at least two whole copies of a pattern."""
        runs = [Run(p, 1 + m // p, p + m) for p, m in enumerate(self._matches) if p and m >= p]
        return next((run for run in runs if run.runaway), runs[0] if runs else None)

    @property
    def runaway(self) -> bool:
        """Whether the tail is beyond anything that people say: stop."""
        tail = self.tail
        return tail is not None and tail.runaway

    def _count(self, item: Hashable) -> None:
        for period, earlier in enumerate(reversed(self._recent), start=1):
            self._matches[period] = self._matches[period] + 1 if item == earlier else 0


class _Collapser:
    """Reads items one by one and keeps a list that holds no run.

    ``_matches[i]`` says for the i-th kept item, by period, how many items up to it equal the one that long before them.
    When that makes a run, the list is cut back to the first copy, and the counts with it: so what is kept never holds a
    run, whatever came together by the cut. After a cut, further whole copies are swallowed; what was swallowed of a copy
    that then breaks off is put back. Those are fewer than the cut before them took: all is linear.
    """

    def __init__(self, items: Sequence[Hashable], needed: Sequence[int]) -> None:
        self._items = items
        self._longest = len(needed) - 1
        self._limits = [period * (copies - 1) for period, copies in enumerate(needed)]
        """Matches that make a run, by period; the first entry is not used."""
        self._out: list[Hashable] = []
        self._matches: list[dict[int, int]] = []
        self.kept: list[int] = []
        """Places in the input of what is kept."""
        self._pattern: list[Hashable] = []
        """Of the run that is being swallowed; empty outside."""
        self._swallowed: list[int] = []
        """Places in the input of the copy that has begun."""

    def read(self) -> None:
        for place in range(len(self._items)):
            self._take([place])

    def end(self) -> None:
        """Put back what was swallowed of a last copy."""
        while self._swallowed:
            self._take(self._release())

    def _take(self, waiting: list[int]) -> None:
        """The items of a stack of places, and whatever is put back on it meanwhile."""
        while waiting:
            place = waiting.pop()
            if not self._pattern:
                self._keep(self._items[place], place)
            elif self._items[place] == self._pattern[len(self._swallowed)]:
                self._swallowed.append(place)
                if len(self._swallowed) == len(self._pattern):
                    self._swallowed.clear()
            else:
                waiting += [place, *self._release()]

    def _release(self) -> list[int]:
        """The end of the run: what was swallowed of a copy, as a stack."""
        released = self._swallowed[::-1]
        self._swallowed.clear()
        self._pattern.clear()
        return released

    def _keep(self, item: Hashable, place: int) -> None:
        before = self._matches[-1] if self._matches else {}
        now: dict[int, int] = {}
        recent = self._out[: -self._longest - 1 : -1]
        self._out.append(item)
        self.kept.append(place)
        self._matches.append(now)
        if item not in recent:
            return
        for period, earlier in enumerate(recent, start=1):
            if earlier == item:
                now[period] = before.get(period, 0) + 1
                if now[period] >= self._limits[period]:
                    self._cut(period)
                    return

    def _cut(self, period: int) -> None:
        length = len(self._out) - self._limits[period]
        del self._out[length:], self._matches[length:], self.kept[length:]
        self._pattern = self._out[length - period :]


def _collapse(items: Sequence[Hashable], needed: Sequence[int], *, drop_tail: bool = False) -> list[int]:
    """Places of the items that stay, in order; without the partial copy at the very end if ``drop_tail``."""
    collapser = _Collapser(items, needed)
    collapser.read()
    if not drop_tail:
        collapser.end()
    return collapser.kept


def _word_key(word: str) -> str:
    """What makes two words the same: letters and digits, without case; a mark alone stands for itself."""
    bare = word.strip()
    letters = "".join(c for c in unicodedata.normalize("NFKC", bare).casefold() if c.isalnum())
    return letters or bare
