"""Tokens and words of a text that was put together and shortened: those that are left of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shared.messages import Word
from shared.scripts import separator

Scored = tuple[str, float]
"""Text of a token and its log probability."""


@dataclass(frozen=True, slots=True)
class Part:
    """A text with its tokens and its words, where they are known."""

    text: str
    tokens: Sequence[Scored] = ()
    words: Sequence[Word] = ()


class Spelling:
    """Parts that stand one after the other, with a space between where their scripts have spaces."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.spans: list[tuple[int, int]] = []
        """Begin and end of each part's text in the whole."""
        self.text = ""
        for part in parts:
            self.text += separator(self.text, part.text)
            begin = len(self.text)
            self.text += part.text
            self.spans.append((begin, len(self.text)))

    def tokens(self, places: Sequence[int]) -> tuple[Scored, ...]:
        """What is left of the tokens where only the characters at ``places`` are; they spell it. None if they did not before.

        A space between two parts belongs to the token behind it.
        """
        left = self._left(places)
        found: list[Scored] = []
        end = 0
        for part, (begin, _) in zip(self.parts, self.spans, strict=True):
            spelled = "".join(token for token, _ in part.tokens)
            if spelled.strip() != part.text.strip():
                return ()
            at = begin - (len(spelled) - len(spelled.lstrip())) + (len(part.text) - len(part.text.lstrip()))
            for token, score in part.tokens:
                at += len(token)
                text = "".join(self.text[place] for place in range(end, min(at, len(self.text))) if left[place])
                end = max(end, at)
                if text:
                    found.append((text, score))
        return tuple(found)

    def words(self, places: Sequence[int]) -> tuple[Word, ...]:
        """The words that are whole where only the characters at ``places`` are; none if other letters are left, too."""
        left = self._left(places)
        found: list[Word] = []
        rest = _letters(self.text[place] for place in places)
        for word, start in self._placed():
            span = left[start : start + len(word.text)]
            if start >= 0 and all(span):
                found.append(word)
                rest -= _letters(word.text)
        return () if rest else tuple(found)

    def _placed(self) -> Iterator[tuple[Word, int]]:
        """Words with their place in the whole; -1 for one that is not there."""
        for part, (begin, _) in zip(self.parts, self.spans, strict=True):
            at = begin
            for word in part.words:
                start = self.text.find(word.text, at, begin + len(part.text))
                yield word, start
                at = max(at, start + len(word.text))

    def _left(self, places: Sequence[int]) -> bytearray:
        left = bytearray(len(self.text))
        for place in places:
            left[place] = 1
        return left


def _letters(text: Iterable[str]) -> int:
    return sum(char.isalnum() for char in text)
