"""Text that was said already, and the same sound heard again: how they go together without a word lost or doubled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.scripts import separator
from worker.text.stabilizer import pieces

_WORD = 1_000
"""Cost of a word that is heard again and was not said. Costs are integers, so that equal ones are equal."""
_EXTRA = _WORD // 2
"""Cost of a word that was said and is not heard again: much of it is, because it was a run-away. It is the less of the two, so
long junk is never matched with as many good words."""
_ALIKE = 0.4
"""Words that share at least so much are one word heard twice (Dice's coefficient of their letters and pairs of letters):
"colour" and "color" share 0.78, "cad" and "cat" 0.6, "winter" and "summer" 0.29."""

_Costs = npt.NDArray[np.int64]


def continued(said: str, text: str) -> str:
    """``said``, and what ``text``, another hearing of the same sound from its start, has beyond it.

    Usually ``text`` begins with ``said``. Otherwise ``said`` is matched with the beginning of ``text`` that it is closest to
    (edit distance over words), the shortest of several, so that a word is rather doubled than lost. Costs one vector operation
    a word of ``said``: a run-away has hundreds, and calls wait meanwhile.
    """
    if not said or text.startswith(said):
        return text
    ours, theirs = pieces(said), pieces(text)
    # Beyond this length every further word costs more than not to match any.
    longest = len(ours) + len(ours) * _EXTRA // _WORD
    same = _closest_beginning(_keys(ours), _keys(theirs[:longest]))
    rest = "".join(theirs[same:]).rstrip()
    return said + rest if same else said + separator(said, rest) + rest


def _keys(words: list[str]) -> list[str]:
    return ["".join(c for c in word.casefold() if c.isalnum()) for word in words]


def _closest_beginning(said: list[str], text: list[str]) -> int:
    """How many words of ``text`` are what was said."""
    alike = _Alike(text)
    steps = np.arange(len(text) + 1) * _WORD
    row = steps
    for word in said:
        kept = row + _EXTRA
        kept[1:] = np.minimum(kept[1:], row[:-1] + alike.costs(word))
        # A word of the text that was not said: what stands to the left, and one more.
        row = np.minimum.accumulate(kept - steps) + steps
    return int(row.argmin())


class _Alike:
    """What it costs to take one word for another, for all words of a text at once."""

    def __init__(self, text: list[str]) -> None:
        features = [_features(word) for word in text]
        self._sizes = np.array([len(each) for each in features], np.int64)
        places: dict[str, list[int]] = {}
        for place, each in enumerate(features):
            for feature in each:
                places.setdefault(feature, []).append(place)
        self._places = {feature: np.array(where) for feature, where in places.items()}

    def costs(self, word: str) -> _Costs:
        features = _features(word)
        shared = np.zeros(len(self._sizes), np.int64)
        for feature in features:
            if feature in self._places:
                shared[self._places[feature]] += 1
        share = 2 * shared / (self._sizes + len(features))
        near = np.rint((1 - share) * _WORD).astype(np.int64)
        return np.where(share >= _ALIKE, near, _WORD + _EXTRA)


def _features(word: str) -> set[str]:
    return {*word, *(word[n : n + 2] for n in range(len(word) - 1))} or {""}
