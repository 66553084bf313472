"""Scripts that write no space between words, and what stands between two pieces of text because of them."""

from __future__ import annotations

_LETTERS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark and zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xA9E0, 0xA9FF),  # Myanmar
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),  # Han, compatibility
    (0xFF66, 0xFF9F),  # Katakana, half width
    (0x20000, 0x3FFFF),  # Han, later planes
)
"""Blocks of scripts that put no spaces between words."""

_PUNCTUATION = (
    (0x3000, 0x303F),  # CJK punctuation
    (0xFF00, 0xFF65),  # full width Latin and punctuation
)
"""What such a text uses beside its letters, also without spaces."""

VOWELS_BEFORE = frozenset("เแโใไເແໂໃໄ")
"""Thai and Lao vowels that are written before the consonant that they follow."""
SIGNS_AFTER = frozenset("ะาำๆฯະາຳໆ")
"""Thai and Lao vowels and signs that go with the letter before them."""


def separator(previous: str, following: str) -> str:
    """What stands between two texts: a space, or nothing where there is one or where both scripts write none.

    Looks only at the last and the first character, so that it can be known from the first words of a segment.
    """
    if not previous or not following or previous[-1].isspace() or following[0].isspace():
        return ""
    return "" if is_spaceless(previous[-1]) and is_spaceless(following[0]) else " "


def is_spaceless(char: str) -> bool:
    """Whether a character belongs to a script that puts no spaces between words (Han, kana, Thai, …), punctuation included."""
    return is_spaceless_letter(char) or _within(char, _PUNCTUATION)


def is_spaceless_letter(char: str) -> bool:
    """The same for letters alone."""
    return _within(char, _LETTERS)


def _within(char: str, blocks: tuple[tuple[int, int], ...]) -> bool:
    point = ord(char)
    return point >= 0x0E00 and any(first <= point <= last for first, last in blocks)
