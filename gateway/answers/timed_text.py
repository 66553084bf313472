"""The words of a segment with their times, whatever the engine gave: exact times, estimated ones, or none.

Text comes from the segment alone, so that no punctuation is lost; the engine's words only say when. Where they do not
spell the same letters as the text, or where there are none, the time of the speech is spread over the text by length.
Times here are whole milliseconds from the start of the recording.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shared.messages import SegmentDone, Word
from shared.pcm import SAMPLE_RATE
from shared.scripts import SIGNS_AFTER, VOWELS_BEFORE, is_spaceless

# Characters that must not begin a line, or end one, in scripts that may be broken anywhere: JIS X 4051's rule for
# Japanese, its usual counterpart for Chinese, and the vowels that Thai and Lao write after or before their consonant.
_NEVER_FIRST = SIGNS_AFTER | frozenset(
    "、。，．・：；？！‼⁇⁈⁉゛゜ヽヾゝゞ々〻ー）］｝〕〉》」』】〙〗〟’”｠»ぁぃぅぇぉっゃゅょゎゕゖァィゥェォッャュョヮヵヶ…‥～％"
)
_NEVER_LAST = VOWELS_BEFORE | frozenset("（［｛〔〈《「『【〘〖〝‘“｟«")

_WIDE = frozenset("WF")
_NO_WIDTH = frozenset({"Mn", "Me", "Cf"})
_MARKS = frozenset({"Mn", "Me", "Mc"})
_JOINERS = frozenset("\u200c\u200d")
_ARROW = re.compile("-{2,}>")


class Token(NamedTuple):
    """A piece of text that is never broken."""

    text: str
    start: int
    end: int
    glued: bool
    """No space stands before it."""
    width: int
    """Columns: wide characters are two, combining marks none."""


def timed_tokens(segment: SegmentDone, *, glued: bool, max_width: int) -> list[Token]:
    """The text of a segment as tokens of at most ``max_width`` columns; times never decrease.

    ``glued`` says whether the first one follows the text before it without a space.
    """
    pieces = [
        (piece, index > 0)
        for word in clean(segment.text).split()
        for index, piece in enumerate(break_word(word, max_width))
    ]
    texts = [piece for piece, _ in pieces]
    spans = _aligned(texts, segment.words) or _spread(texts, *_speech(segment))
    tokens: list[Token] = []
    clock = 0
    for (piece, inner), (start, end) in zip(pieces, spans, strict=True):
        start = max(start, clock)
        clock = max(end, start)
        tokens.append(Token(piece, start, clock, inner if tokens else glued, columns(piece)))
    return tokens


def estimated_words(segment: SegmentDone) -> tuple[Word, ...]:
    """Words of a segment whose engine gave none, spread over its speech by length; seconds."""
    tokens = timed_tokens(segment, glued=False, max_width=1 << 30)
    return tuple(Word(token.text, token.start / 1000, token.end / 1000) for token in tokens)


def clean(text: str) -> str:
    """Text without what no subtitle can hold: control characters, a byte-order mark, the arrow of a time line."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _unprintable(char) for char in text)
    return _ARROW.sub("->", text)


def columns(text: str) -> int:
    """Width of a text as a terminal or a subtitle editor counts it."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(0 if category(char) in _NO_WIDTH else 2 if east_asian_width(char) in _WIDE else 1 for char in text)


def break_word(word: str, max_width: int) -> list[str]:
    """A word between spaces as pieces that may stand on different lines.

    One piece, unless its script has no spaces or it is wider than ``max_width``.
    """
    if word.isascii():
        return [word[i : i + max_width] for i in range(0, len(word), max_width)]
    if not any(map(is_spaceless, word)):
        return list(_fitting(word, max_width))
    pieces: list[str] = []
    for char in word:
        if pieces and not _may_break(pieces[-1], char):
            pieces[-1] += char
        else:
            pieces.append(char)
    return [part for piece in pieces for part in _fitting(piece, max_width)]


def _may_break(before: str, char: str) -> bool:
    if _combines(char) or char in _NEVER_FIRST or before[-1] in _NEVER_LAST or before[-1] in _JOINERS:
        return False
    return is_spaceless(char) or is_spaceless(_base(before))


def _base(text: str) -> str:
    """Last character that is not a combining mark."""
    return next((char for char in reversed(text) if not _combines(char)), text[-1])


def _fitting(piece: str, max_width: int) -> Iterator[str]:
    """``piece`` cut where it must be: parts of at most ``max_width`` columns, marks left with their letters."""
    if 2 * len(piece) <= max_width:
        yield piece
        return
    part, width = "", 0
    for char in piece:
        step = columns(char)
        if width + step > max_width:
            yield part
            part, width = "", 0
        part += char
        width += step
    yield part


def _combines(char: str) -> bool:
    if char < "\u0300":
        return False
    from unicodedata import category

    return char in _JOINERS or category(char) in _MARKS


def _unprintable(char: str) -> str:
    if char.isspace():
        return " "
    point = ord(char)
    return "" if point < 0xA0 or point == 0xFEFF or 0xD800 <= point < 0xE000 else char


def _speech(segment: SegmentDone) -> tuple[int, int]:
    """Milliseconds from the first to the last sound of a segment: its words' if it has any, else what VAD found."""
    if segment.words:
        return _ms(segment.words[0].start), max(_ms(word.end) for word in segment.words)
    return segment.start_sample * 1000 // SAMPLE_RATE, segment.speech_end_sample * 1000 // SAMPLE_RATE


def _spread(texts: Sequence[str], start: int, end: int) -> list[tuple[int, int]]:
    """Consecutive spans over [start, end], each as long as its text."""
    marks = [0, *accumulate(max(1, len(text)) for text in texts)]
    length = max(0, end - start)
    times = [start + mark * length // marks[-1] for mark in marks] if texts else []
    return list(pairwise(times))


def _aligned(texts: Sequence[str], words: Sequence[Word]) -> list[tuple[int, int]] | None:
    """Spans by letter: token and word that share letters share time. None unless both spell the same letters."""
    letters = [_letters(text) for text in texts]
    spoken = [_letters(word.text) for word in words]
    if not words or "".join(letters) != "".join(spoken):
        return None
    spans_of_letters = [
        span
        for word, spelling in zip(words, spoken, strict=True)
        for span in _spread(spelling, _ms(word.start), _ms(word.end))
    ]
    spans: list[tuple[int, int]] = []
    position, clock = 0, _ms(words[0].start)
    for spelling in letters:
        if spelling:  # punctuation alone takes no time
            begin = spans_of_letters[position][0]
            position += len(spelling)
            clock = spans_of_letters[position - 1][1]
        else:
            begin = clock
        spans.append((begin, clock))
    return spans


def _letters(text: str) -> str:
    return "".join(char for char in text.casefold() if char.isalnum())


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
