"""Estimated times of words, for engines that give none: a text spread over the stretches of speech that VAD found.

The longer a word is written, the longer it takes to say. That is a guess: enough for subtitles and for clicking on a
word, and no more, which is why such times are called estimated (``Capabilities.word_times``). What VAD knows is kept
exactly: no word lies in a pause, and speech after a pause begins with a word.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from shared.messages import Word
from shared.scripts import SIGNS_AFTER, VOWELS_BEFORE, is_spaceless_letter

_DIGIT_WEIGHT = 3.0
"""A digit is spoken as a word of its own: "two", "seven"."""
_SPACELESS_WEIGHT = 2.0
"""A Han character or a kana is a syllable; a syllable of English has two or three letters."""
_WORD_WEIGHT = 1.0
"""What every word costs beside its letters; also keeps a word without any from taking no time."""

_OPENING = frozenset({"Ps", "Pi"})
_EXTENDING = frozenset({"Mn", "Me", "Mc", "Cf", "Sk", "Lm"})
"""Categories that go with the character before: marks, joiners, the sign that lengthens a kana."""
_FOLLOWING = SIGNS_AFTER | frozenset("ぁぃぅぇぉゃゅょゎァィゥェォャュョヮ")
"""Letters that go with the one before; of kana the small ones."""


def spread_words(text: str, regions: Sequence[tuple[float, float]]) -> tuple[Word, ...]:
    """The words of ``text`` with estimated times inside ``regions``.

    ``regions`` are ``(start, end)`` in seconds, in order, without overlap; empty ones are ignored, and without any there
    are no words. Every word has ``start < end``, lies in one region and begins at or after the end of the word before it.
    Which words go to which region follows from the lengths of both: a region's edge moves to the nearest end of a word, so
    that no word straddles a pause. In scripts without spaces a word is a character with its marks and punctuation.
    Raises ValueError if the regions are not in order.
    """
    places = [(start, end) for start, end in regions if end > start]
    if any(after[0] < before[1] for before, after in pairwise(places)):
        raise ValueError("Regions of speech overlap or are out of order.")
    words = split_words(text)
    if not words or not places:
        return ()
    marks = [0.0, *accumulate(_weight(word) for word in words)]
    timed: list[Word] = []
    for (start, end), (first, last) in zip(places, _shares(marks, places), strict=True):
        timed += _fill(words[first:last], marks[first : last + 1], start, end)
    return tuple(timed)


def split_words(text: str) -> list[str]:
    """Words between white space; in scripts without spaces, characters with what belongs to them. Punctuation stays with
    the word before it (an opening bracket with the word after it), so that nothing but white space is lost; text without a
    letter or digit has no words."""
    units: list[str] = []
    for chunk in text.split():
        units += cut_units(chunk)
    return _join_marks(units)


def _shares(marks: Sequence[float], places: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    """For each region the range of its words: edges of regions, on the scale of spoken weight, moved to ends of words."""
    spoken = list(accumulate(end - start for start, end in places))
    inner = [_nearest(marks, edge / spoken[-1] * marks[-1]) for edge in spoken[:-1]]
    return list(pairwise([0, *inner, len(marks) - 1]))


def _nearest(marks: Sequence[float], value: float) -> int:
    """Index of the mark closest to ``value``."""
    after = min(bisect_left(marks, value), len(marks) - 1)
    before = max(0, after - 1)
    return before if value - marks[before] < marks[after] - value else after


def _fill(words: Sequence[str], marks: Sequence[float], start: float, end: float) -> list[Word]:
    """The words one after the other over the whole region."""
    if not words:
        return []
    scale = (end - start) / (marks[-1] - marks[0])
    times = [start + (mark - marks[0]) * scale for mark in marks[:-1]] + [end]
    return [Word(word, begin, stop) for word, (begin, stop) in zip(words, pairwise(times), strict=True)]


def _weight(word: str) -> float:
    return _WORD_WEIGHT + sum(map(_char_weight, word))


def _char_weight(char: str) -> float:
    if not char.isalnum():
        return 0.0
    if char.isdecimal():
        return _DIGIT_WEIGHT
    return _SPACELESS_WEIGHT if is_spaceless_letter(char) else 1.0


def cut_units(chunk: str) -> list[str]:
    """A stretch without white space, cut before every character of a script without spaces and after each."""
    if chunk.isascii() or not any(map(is_spaceless_letter, chunk)):
        return [chunk]
    units = [chunk[0]]
    for before, char in pairwise(chunk):
        if _may_cut(before, char):
            units.append(char)
        else:
            units[-1] += char
    return units


def _may_cut(before: str, char: str) -> bool:
    if char in _FOLLOWING or unicodedata.category(char) in _EXTENDING:
        return False
    if before in VOWELS_BEFORE or unicodedata.category(before) == "Cf":
        return False
    return is_spaceless_letter(char) or is_spaceless_letter(before) or unicodedata.category(char) in _OPENING


def _join_marks(units: Sequence[str]) -> list[str]:
    """Units without a letter or digit joined to a neighbour: opening brackets to the next, others to the one before."""
    words: list[str] = []
    waiting = ""
    for unit in units:
        if any(char.isalnum() for char in unit):
            words.append(waiting + unit)
            waiting = ""
        elif waiting or not words or unicodedata.category(unit[-1]) in _OPENING:
            waiting += unit
        else:
            words[-1] += unit
    if words:
        words[-1] += waiting
    return words
