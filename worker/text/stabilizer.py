"""Which words of a changing hypothesis are certain enough to be said: only those are, and what was said stays.

Local agreement between two hypotheses in a row (LA-2: Liu, Spanakis, Niehues, "Low-Latency Sequence-to-Sequence Speech
Recognition and Translation by Partial Hypothesis Selection", Interspeech 2020): the common beginning of the last two is
certain, but for its last word, which may still grow ("the cat" must never become "the caterpillar" by "erpillar").
"""

from __future__ import annotations

import re

from worker.text.word_times import cut_units

_WORD = re.compile(r"(\s*)(\S+)")


def pieces(text: str) -> list[str]:
    """Words (characters, in a script without spaces) with the space in front of each: together they are the text."""
    found: list[str] = []
    for match in _WORD.finditer(text):
        first, *others = cut_units(match[2])
        found += [match[1] + first, *others]
    return found


class Stabilizer:
    """The text of one utterance. ``said`` is what has left, and only grows."""

    def __init__(self, said: str = "") -> None:
        """``said``: deltas of an earlier generation."""
        self.said = said
        self._last: list[str] = []
        self._shown: list[str] = []

    def hypothesis(self, text: str) -> str:
        """Take a hypothesis of the whole utterance; returns the words that have become certain, "" for none."""
        now = pieces(text)
        agreed = _common(self._last, now)
        self._last = self._shown = now
        return self._say("".join(now[: max(0, min(agreed, len(now) - 1))]))

    def final(self, text: str) -> str:
        """Take the final text; returns the rest of it, or "" if it does not start with what was said."""
        return self._say(text)

    def revised(self, text: str) -> float:
        """Share of the words of the last hypothesis that the final text has otherwise, 0 to 1."""
        if not self._shown:
            return 0.0
        final = [piece.strip() for piece in pieces(text)]
        shown = [piece.strip() for piece in self._shown]
        return 1.0 - _kept(shown, final) / len(shown)

    def _say(self, certain: str) -> str:
        if not certain.startswith(self.said):
            return ""
        new, self.said = certain[len(self.said) :], max(self.said, certain, key=len)
        return new


def _kept(shown: list[str], final: list[str]) -> int:
    """Length of the longest common subsequence, 64 words of ``shown`` at a time (Hyyrö, "Bit-Parallel LCS-length Computation
    Revisited", 2004): a run-away has hundreds of words, a few different ones, and calls wait meanwhile."""
    places: dict[str, int] = {}
    for place, word in enumerate(shown):
        places[word] = places.get(word, 0) | 1 << place
    everywhere = (1 << len(shown)) - 1
    free = everywhere
    for word in final:
        taken = free & places.get(word, 0)
        free = ((free + taken) | (free - taken)) & everywhere
    return len(shown) - free.bit_count()


def _common(a: list[str], b: list[str]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
