"""Text to tokens and back, for a byte-level tokenizer, one token at a time.

The tokenizer's own ``decode`` works on whole lists; a step of 128 rows cannot afford that per row, and a list cut inside a
character cannot be decoded at all. A table of bytes per token can.
"""

from __future__ import annotations

import tokenizers

from shared.errors import ModelLoadFailed
from worker.engines.qwen3.checkpoint import Checkpoint, load_tokenizer


def _symbol_bytes() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers use for the 256 bytes (GPT-2's table).

    Bytes that are printable in Latin-1 stand for themselves; the others follow from U+0100 upwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_SYMBOLS = _symbol_bytes()
_SAME_CHECKPOINT = "Take the tokenizer files from the same checkpoint as the weights."


class Vocabulary:
    """A checkpoint's tokenizer, with the ids that the prompt and the parser need."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        by_text = {text: i for i, text in self._added.items()}
        names = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<asr_text>")
        absent = [name for name in names if name not in by_text]
        if absent:
            raise ModelLoadFailed(
                f"The tokenizer lacks {', '.join(absent)}.",
                hint=_SAME_CHECKPOINT,
            )
        self.turn_start, self.turn_end, self.audio_start, self.audio_end, self.audio_pad, self.text_tag = (
            by_text[name] for name in names
        )
        self.end_of_text = by_text.get("<|endoftext|>", self.turn_end)
        self.timestamp = by_text.get("<timestamp>")
        self.added_texts = tuple(sorted(by_text, key=len, reverse=True))
        """Every token that is not plain text, longest first."""
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text. Markup of the model inside ``text`` is taken out first, so nobody can speak for the system."""
        clean = self.without_markup(text)
        ids = self._tokenizer.encode(clean, add_special_tokens=False).ids if clean else []
        return [i for i in ids if i not in self._added]

    def without_markup(self, text: str) -> str:
        """``text`` without any of the model's own tokens, also where taking one out would put another together."""
        while True:
            before = text
            for token in self.added_texts:
                text = text.replace(token, "")
            if text == before:
                return text

    def is_markup(self, token: int) -> bool:
        return token in self._added

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes (perhaps part of a character) of one token; empty for markup and for ids the tokenizer has not."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return b""
        symbols = self._tokenizer.id_to_token(token)
        return bytes(_SYMBOLS[char] for char in symbols) if symbols else b""


def load_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """The checkpoint's own. Raises ModelLoadFailed if it lacks markup, or has an id that the model has no embedding for.

    Somebody's text would find such an id, and on a GPU a row that is not there ends the process.
    """
    tokenizer, rows = load_tokenizer(checkpoint), checkpoint.config.text_config.vocab_size
    highest = max(tokenizer.get_vocab_size(with_added_tokens=False) - 1, *tokenizer.get_added_tokens_decoder(), 0)
    if highest >= rows:
        raise ModelLoadFailed(
            f"The tokenizer's ids go up to {highest}, and the model has only {rows} rows for them.",
            hint=_SAME_CHECKPOINT,
        )
    return Vocabulary(tokenizer)
