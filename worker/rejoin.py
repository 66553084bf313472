"""Text that was said already, and the same sound heard again: how they go together without a word lost or doubled."""

from __future__ import annotations

import difflib

from worker.stabilizer import pieces

_ALIKE = 0.6
"""Words that share at least so much (difflib's ratio) are one word heard twice."""
_EXTRA = 0.5
"""Cost of a word that was said and is not heard again: much of it is, because it was a run-away. A word that is heard
again and was not said costs 1, so long junk is never matched with as many good words."""


def continued(said: str, text: str) -> str:
    """``said``, and what ``text``, another hearing of the same sound from its start, has beyond it.

    Usually ``text`` begins with ``said``. Otherwise ``said`` is matched with the beginning of ``text`` that it is closest to
    (edit distance over words), the shortest of several, so that a word is rather doubled than lost. Costs the product of
    both lengths in words.
    """
    if not said or text.startswith(said):
        return text
    ours, theirs = pieces(said), pieces(text)
    rest = "".join(theirs[_closest_beginning(_keys(ours), _keys(theirs)) :])
    return said + rest.rstrip()


def _keys(words: list[str]) -> list[str]:
    return ["".join(c for c in word.casefold() if c.isalnum()) for word in words]


def _closest_beginning(said: list[str], text: list[str]) -> int:
    """How many words of ``text`` are what was said."""
    row = [float(n) for n in range(len(text) + 1)]
    for word in said:
        before, row = row, [row[0] + _EXTRA]
        for n, other in enumerate(text):
            row.append(min(before[n] + _change(word, other), before[n + 1] + _EXTRA, row[n] + 1.0))
    return min(range(len(row)), key=row.__getitem__)


def _change(word: str, other: str) -> float:
    if word == other:
        return 0.0
    ratio = difflib.SequenceMatcher(a=word, b=other, autojunk=False).ratio()
    return 1.0 - ratio if ratio >= _ALIKE else 1.0 + _EXTRA
