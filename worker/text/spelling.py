"""What belonged to a text before it was shortened, brought down to what is left of it."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages import Word

Scored = tuple[str, float]
"""Text of a token and its log probability."""


def spelling(tokens: Iterable[Scored], text: str) -> tuple[Scored, ...]:
    """The tokens, without what ``text`` lacks of them, so that they spell it; none if they do not, whatever is left out.

    White space that they lack goes to the token behind it.
    """
    found: list[Scored] = []
    at = 0
    for token, score in tokens:
        begin = at
        for char in token:
            if text[at : at + 1] == char:
                at += 1
            elif text[at : at + 1].isspace() and text[at + 1 : at + 2] == char:
                at += 2
        if at > begin:
            found.append((text[begin:at], score))
    return tuple(found) if at == len(text) else ()


def words_of(words: Iterable[Word], text: str) -> tuple[Word, ...]:
    """The words that ``text`` still has, in order; none if it has others."""
    found: list[Word] = []
    rest = text.lstrip()
    for word in words:
        if rest.startswith(word.text):
            found.append(word)
            rest = rest[len(word.text) :].lstrip()
    return () if rest else tuple(found)
