"""The turns around the audio, built here and not by a chat template, so that every transformers version sees the same.

::

    <|im_start|>system\\n{context}<|im_end|>\\n<|im_start|>user\\n<|audio_start|>{audio}<|audio_end|><|im_end|>\\n
    <|im_start|>assistant\\n[language English<asr_text>][prefix]

The context is free text and key words. A forced language stands at the start of the answer with its English name, as the
model was trained; without one the model says ``language X<asr_text>`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.languages import NAMES
from worker.engines.qwen3.vocabulary import Vocabulary

MAX_CONTEXT_TOKENS = 512
"""Of the system turn. Key words come first and are kept; of a long prompt the end is kept, which is nearest to the audio."""
_LONGEST_TOKEN = 64
"""Characters; a bound that is generous for any tokenizer of this family."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids on both sides of the audio."""

    head: tuple[int, ...]
    """Up to and with ``<|audio_start|>``."""
    tail: tuple[int, ...]
    """From ``<|audio_end|>`` to where the model goes on."""


def build_prompt(
    vocabulary: Vocabulary, *, language: str = "", prompt: str = "", keywords: Sequence[str] = (), prefix: str = ""
) -> Prompt:
    """Prompt of a request. ``language`` is a code of ``shared.languages.NAMES`` or empty; ``prefix`` needs a language."""
    v = vocabulary
    opening = v.encode("system\n" + context_of(v, prompt, keywords))
    line = v.encode("\n")
    head = [v.turn_start, *opening, v.turn_end, *line, v.turn_start, *v.encode("user\n"), v.audio_start]
    tail = [v.audio_end, v.turn_end, *line, v.turn_start]
    tail += [*v.encode(f"assistant\nlanguage {NAMES[language]}"), v.text_tag] if language else v.encode("assistant\n")
    if language and prefix:
        tail += prefix_tokens(v, prefix)
    return Prompt(tuple(head), tuple(tail))


def prefix_tokens(vocabulary: Vocabulary, prefix: str) -> list[int]:
    """Tokens of text that stands already. White space at its end belongs to the word that follows, in every tokenizer."""
    return vocabulary.encode(prefix.rstrip())


def context_of(vocabulary: Vocabulary, prompt: str, keywords: Sequence[str]) -> str:
    """Text of the system turn, within MAX_CONTEXT_TOKENS and free of markup."""
    words = ", ".join(word for word in (keyword.strip() for keyword in keywords) if word)
    words = _shorten(vocabulary, vocabulary.without_markup(words), MAX_CONTEXT_TOKENS, keep_end=False)
    room = MAX_CONTEXT_TOKENS - len(vocabulary.encode(words)) - 1
    text = _shorten(vocabulary, vocabulary.without_markup(prompt), room, keep_end=True)
    return "\n".join(part for part in (text, words) if part)


def _shorten(vocabulary: Vocabulary, text: str, limit: int, *, keep_end: bool) -> str:
    if limit <= 0:
        return ""
    # No token is longer than a few words, so text far beyond the limit need not be tokenised to be dropped.
    reach = limit * _LONGEST_TOKEN
    text = text[-reach:] if keep_end else text[:reach]
    ids = vocabulary.encode(text)
    if len(ids) <= limit:
        return text
    kept = ids[-limit:] if keep_end else ids[:limit]
    # A cut may fall inside a character; what is left of it goes too.
    return b"".join(vocabulary.bytes_of(i) for i in kept).decode("utf-8", "ignore")
