"""A transcript as the words that are shown, each with the units that the forced aligner times.

Units are those of transformers' processor for the aligner (``Qwen3ASRProcessor.split_words_for_alignment``): stretches between
white space, ideographs one by one, in Japanese the morphemes of nagisa; of each only letters, digits and apostrophes. For
Korean the processor asks soynlp's ``LTokenizer`` without a dictionary, and that finds every word to be one piece: white space
is all that cuts, and no ideograph is cut off. (Qwen's own package gives it a dictionary, and times stems and endings apart.)

What is shown loses nothing of the text but white space. Punctuation stands with a word beside it, and no word or number of a
script that writes spaces is shown in pieces, even if the aligner times them (nagisa cuts ``3.14`` into digits).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from shared.scripts import is_spaceless, is_spaceless_letter
from worker.engines.qwen3 import japanese

_IDEOGRAPHS = "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
_STRETCH = re.compile(r"\S+")
_IDEOGRAPH_OR_STRETCH = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_OPENING = frozenset({"Ps", "Pi"})


@dataclass(frozen=True, slots=True)
class AlignedText:
    """A word as it is shown, and as the aligner reads it: one unit or more."""

    shown: str
    units: tuple[str, ...]


class _Unit(NamedTuple):
    """What is spoken, and the span of the text that it comes from: from its first letter to behind its last."""

    start: int
    end: int
    spoken: str


def prepare(language: str) -> None:
    """Load what ``split_words`` needs for this language. Raises Unsupported where it is not installed."""
    if language == "ja":
        japanese.load()


def split_words(text: str, language: str) -> list[AlignedText]:
    """Words of ``text``, in order; text without a letter or digit has none. ``language`` is a code of ISO 639.

    Joined, the shown words are the text without its white space. Raises Unsupported as ``prepare`` does.
    """
    groups: list[list[_Unit]] = []
    text = text.strip()
    for unit in _units(text, language):
        if groups and _is_one_word(text, groups[-1][-1], unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    # Where what is shown of each word begins, and where the last one ends.
    edges = [0, *(_edge(text, before[-1].end, after[0].start) for before, after in pairwise(groups)), len(text)]
    return [
        AlignedText(_shown(text, group, edges[n], edges[n + 1]), tuple(unit.spoken for unit in group))
        for n, group in enumerate(groups)
    ]


def _units(text: str, language: str) -> Iterator[_Unit]:
    if language == "ja":
        pieces, origins = japanese.morphemes(text)
        read = "".join(pieces)
        spans = list(pairwise(accumulate(map(len, pieces), initial=0)))
    else:
        read, origins = text, [(n, n + 1) for n in range(len(text))]
        pattern = _STRETCH if language == "ko" else _IDEOGRAPH_OR_STRETCH
        spans = [found.span() for found in pattern.finditer(text)]
    for start, end in spans:
        if spoken := [n for n in range(start, end) if _is_spoken(read[n])]:
            yield _Unit(origins[spoken[0]][0], origins[spoken[-1]][1], "".join(read[n] for n in spoken))


def _is_spoken(char: str) -> bool:
    return char.isalnum() or char == "'" or _IDEOGRAPH.match(char) is not None


def _is_one_word(text: str, before: _Unit, after: _Unit) -> bool:
    """Whether two units in a row are shown as one word: those of one character (``⑩`` is read as 1 and 0), those that a reader
    does not part, and an apostrophe, which is a unit where it stands alone."""
    if after.start < before.end:
        return True
    gap = text[before.end : after.start]
    if any(map(str.isspace, gap)):
        return False
    if not any(map(str.isalnum, after.spoken)):
        return True
    # A full-width comma may stand in a number, an ideographic one may not.
    parted = any(map(is_spaceless, unicodedata.normalize("NFKC", gap)))
    return not (parted or is_spaceless_letter(text[before.end - 1]) or is_spaceless_letter(text[after.start]))


def _edge(text: str, end: int, start: int) -> int:
    """Where in the gap ``[end, start)`` between two words the second begins: behind the last white space, or with the brackets
    and quotes that open before it."""
    edge = start
    while edge > end and not text[edge - 1].isspace():
        edge -= 1
    if edge > end:
        return edge
    edge = start
    while edge > end and unicodedata.category(text[edge - 1]) in _OPENING:
        edge -= 1
    return edge


def _shown(text: str, group: list[_Unit], begin: int, end: int) -> str:
    """``text[begin:end]``, without the white space around the word."""
    first, last = group[0].start, group[-1].end
    return "".join([*text[begin:first].split(), text[first:last], *text[last:end].split()])
