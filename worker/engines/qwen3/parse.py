"""From output tokens to text: ``language English<asr_text>The words.`` becomes ``("en", "The words.")``.

No part of the markup ever leaks, wherever the output is cut: before the tag nothing counts as text unless it can no longer
be the beginning of a language line. A second line in the middle of the text, or one behind a language that the prompt has named
already, is taken out when its tag comes; until then ``text_so_far`` holds back what may become one. That only grows while tokens
are pushed, so it can be streamed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from shared.languages import NAMES
from shared.scripts import separator
from worker.engines.qwen3.vocabulary import Vocabulary

Scored = tuple[tuple[str, float], ...]
"""Text of tokens with their log probabilities."""

_CODES = {name.lower(): code for code, name in NAMES.items()}
_LANGUAGE = "language"
_LANGUAGE_LINE = re.compile(r"\s*language\s+(?P<name>[^\n<]*)", re.IGNORECASE)
_LINE_AT_END = re.compile(r"(?<![A-Za-z])language\s+(?P<name>[A-Z][A-Za-z]*(?:,[A-Z][A-Za-z]*)*)\s*$")
"""As the model writes it: in text that was spoken, a name behind that word would be a rarity, and a tag behind both is none."""
_LINE_BEGINNING = re.compile(
    r"(?<![A-Za-z])(?:l|la|lan|lang|langu|langua|languag|language(?:\s+(?:[A-Z][A-Za-z]*(?:,[A-Za-z]*)*)?\s*)?)$"
)
_LINE_CUT = re.compile(r"(?<![A-Za-z])language(?:\s+(?:[A-Z][A-Za-z]*(?:,[A-Za-z]*)*)?\s*)?$")
"""A line whose tag may have been cut off with what follows."""
_NO_SPEECH = "none"
_MAX_LANGUAGE_WORDS = 2
"""A line of more words than this after ``language`` is speech, not a language's name."""
_TAGS = re.compile(r"<asr_text>|<timestamp>|<\|[A-Za-z_]{1,24}\|>")
_TAG_BEGINNING = re.compile(r"<(?:\|[A-Za-z_]{0,24}\|?|[a-z_]{0,9})?$")


class OutputParser:
    """Reads the tokens of one sequence as they come.

    ``forced``: the language stood in the prompt, so that everything is text. ``after``: text that stands before the first
    token and stays, whatever follows.
    """

    def __init__(self, vocabulary: Vocabulary, *, forced: bool, after: str = "") -> None:
        self._vocabulary = vocabulary
        self._after = after
        self._forced = forced
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._raw = ""
        self._meta = ""
        self._pushed = 0
        self._spoken: list[tuple[int, str]] = []
        """The number of each token of ``_raw``, and its characters: none while the first of them is not whole."""
        self._separator = ""
        """Stands in ``_raw`` before the next token's characters."""
        self.tagged = forced
        """Whether the text has begun for certain."""

    def push(self, token: int) -> None:
        number = self._pushed
        self._pushed += 1
        if token == self._vocabulary.text_tag and not self.tagged:
            self._meta, self._raw = self._raw, ""
            self._spoken.clear()
            self._utf8.reset()
            self.tagged = True
            return
        if token == self._vocabulary.text_tag:
            self._take_line_out()
            return
        # Bytes of a character that is not whole yet stay in the decoder.
        characters = self._utf8.decode(self._vocabulary.bytes_of(token))
        self._raw += characters
        if characters:
            characters, self._separator = self._separator + characters, ""
        self._spoken.append((number, characters))

    def extend(self, tokens: Iterable[int]) -> OutputParser:
        for token in tokens:
            self.push(token)
        return self

    @property
    def begun(self) -> bool:
        """Whether what comes next is text, and not the line that names the language."""
        return self.tagged or self._is_plain()

    @property
    def text(self) -> str:
        """What was said, if nothing follows; without white space at its ends, but for what stood there before."""
        line = _LINE_AT_END.match(self._raw.lstrip()) if self._forced and not self._after else None
        return self._text("" if line else self._raw)

    @property
    def text_so_far(self) -> str:
        """What was said for certain, whatever follows: a beginning of ``text``."""
        return self._text(_LINE_BEGINNING.sub("", self._raw))

    @property
    def text_if_cut(self) -> str:
        """What was said, if more would have followed: without a language line at its end, whose tag may be what is missing."""
        return self._text(_LINE_CUT.sub("", self._raw))

    @property
    def spoken(self) -> list[int]:
        """Numbers of the tokens that ``text`` is made of, in order of ``push``; the first is 0."""
        return [number for number, _ in self._spoken] if self.begun and not self.no_speech else []

    def scored(self, scores: Sequence[float], text: str) -> Scored:
        """Text and log probability of each of these tokens, whose scores stand at their numbers, up to the end of ``text`` (one of the
        above); tokens that share a character are one entry. None if they do not spell what it has behind ``after``."""
        wanted, said = text[len(self._after) :].strip(), ""
        out: list[tuple[str, float]] = []
        score = 0.0
        for number, characters in self._spoken:
            if said.strip() == wanted:
                break
            score += scores[number]
            if characters:
                out.append((characters, score))
                said += characters
                score = 0.0
        return tuple(out) if said.strip() == wanted else ()

    def _text(self, text: str) -> str:
        if self.no_speech or not self.begun:
            return self._after
        if "<" in text:
            text = _TAG_BEGINNING.sub("", _TAGS.sub("", text))
        if not self._after:
            return text.strip()
        return self._after + (text.strip() if self._after[-1].isspace() else text.rstrip())

    @property
    def language(self) -> str:
        """Code of the language that the model named, empty if it named none that we know."""
        for name in self._language_line().split(","):
            if code := _CODES.get(name.strip().lower()):
                return code
        return ""

    @property
    def no_speech(self) -> bool:
        """The model said ``language None``: there is nothing to hear."""
        return self._language_line().lower() == _NO_SPEECH

    def _take_line_out(self) -> None:
        """A tag has come though the text has begun: the line before it is markup, too."""
        found = _LINE_AT_END.search(self._raw)
        if found is None:
            return
        before = self._raw[: found.start()].rstrip()
        if not before and not self._after:
            self._meta = found[0]
        self._separator = separator(before, "a") if before else ""
        self._raw = before + self._separator
        length = 0
        for kept, (_, characters) in enumerate(self._spoken):
            length += len(characters)
            if length > len(before):
                del self._spoken[kept:]
                break

    def _language_line(self) -> str:
        found = _LANGUAGE_LINE.match(self._meta)
        return found["name"].strip() if found else ""

    def _is_plain(self) -> bool:
        """Output without a tag that cannot become a language line any more: the model ignored the form, and just spoke."""
        words = self._raw.split()
        if not words:
            return False
        if words[0].lower() != _LANGUAGE:
            alone = len(words) == 1 and not self._raw[-1:].isspace()
            return not (alone and _LANGUAGE.startswith(words[0].lower()))
        return len(words) > 1 + _MAX_LANGUAGE_WORDS and "<" not in self._raw


def scored_text(tokens: Iterable[tuple[bytes, float]]) -> Scored:
    """Text and log probability of each token, from its bytes; tokens that share a character are one entry."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    out: list[tuple[str, float]] = []
    score = 0.0
    for piece, value in tokens:
        characters, score = utf8.decode(piece), score + value
        if characters:
            out.append((characters, score))
            score = 0.0
    return tuple(out)
