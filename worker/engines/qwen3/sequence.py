"""One stretch of speech inside the engine: its sound, its place in the cache and the text so far.

What the decoder must know is one line of tokens: head, audio, tail, generated. ``kv`` says how much of it is in the slot.
Everything that can happen is a difference between the two: a new sequence (nothing is in), a decode step (one token is
missing), an eviction (nothing is in again), new audio in a call (the open window and what follows are missing), a prefix
that was put in. So there is one way to catch up, and one to go on.
"""

from __future__ import annotations

from torch import Tensor

from shared.messages import Lane
from shared.pcm import SAMPLE_RATE
from worker.engines.base import Final, SequenceRequest
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.audio import SampleBuffer
from worker.engines.qwen3.guard import CHECK_EVERY, find_runaway
from worker.engines.qwen3.parse import OutputParser
from worker.engines.qwen3.prompt import Prompt, build_prompt, prefix_tokens
from worker.engines.qwen3.vocabulary import Vocabulary

LIVE_HOP = 320 * SAMPLE_RATE // 1000
"""New samples after which an open utterance is heard again."""
BUDGET_PER_SECOND = 12
"""Tokens. The fastest speech in the densest script stays under ten."""
BUDGET_BASE = 24


class Qwen3Sequence:
    """State of a sequence; the engine alone changes it."""

    def __init__(self, request: SequenceRequest, vocabulary: Vocabulary, eos: frozenset[int]) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._eos = eos
        self._prompt: Prompt = build_prompt(
            vocabulary,
            language=request.language,
            prompt=request.prompt,
            keywords=request.keywords,
            prefix=request.prefix,
        )
        self._language = request.language
        self._prefix_ids: tuple[int, ...] = tuple(prefix_tokens(vocabulary, request.prefix)) if request.prefix else ()
        self.samples = SampleBuffer()
        self.windows: list[Tensor] = []
        """Embeddings of closed windows, each ``(104, hidden)``; they never change."""
        self.open_window: Tensor | None = None
        self.loudest: Tensor | None = None
        """Running maximum of log power over the closed windows, for the mel floor."""
        self.heard = 0
        """Samples that the embeddings cover."""
        self.finished = False
        self.closed = False
        self.slot: int | None = None
        self.kv = 0
        self.arrival = 0
        """Order of seating; the highest is the youngest."""
        self.draft: tuple[int, ...] = ()
        """The last hypothesis, to be verified against the new audio in the pass that catches up."""
        self.settled = False
        """Whether the text for what was heard is complete."""
        self.finish_reason = "stop"
        self._shown = 0
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self._pieces: list[bytes] = []
        self._text_from = 0
        forced = bool(self._language)
        self._parser = OutputParser(self._vocabulary, forced=forced)
        if forced:
            self._parser.extend(self._prefix_ids)

    # ------------------------------------------------------------ what the scheduler sees

    @property
    def request(self) -> SequenceRequest:
        return self._request

    @property
    def lane(self) -> Lane:
        return self._request.lane

    @property
    def ready(self) -> bool:
        if self.closed:
            return False
        return self.finished or (self._request.partials and (self.audio_due or self.decoding))

    # ------------------------------------------------------------ what the engine asks

    @property
    def audio_due(self) -> bool:
        """Whether there is sound to encode before anything else makes sense."""
        new = self.samples.length - self.heard
        if self.finished:
            return new > 0
        return new >= LIVE_HOP and self.samples.length >= geometry.MIN_SAMPLES and not self.decoding

    @property
    def decoding(self) -> bool:
        return self.heard > 0 and not self.settled

    @property
    def done(self) -> bool:
        """Nothing is left to compute: the final can be said."""
        return self.finished and not self.audio_due and (self.settled or self.samples.length == 0)

    @property
    def behind(self) -> bool:
        """Whether more than the last token is missing in the slot."""
        return self.audio_due or bool(self.draft) or self.known_length - self.kv != 1

    @property
    def head(self) -> tuple[int, ...]:
        return self._prompt.head

    @property
    def audio_length(self) -> int:
        """Tokens of sound."""
        return geometry.WINDOW_TOKENS * len(self.windows) + (0 if self.open_window is None else len(self.open_window))

    @property
    def known_length(self) -> int:
        """Tokens before the next one, generated ones included."""
        return len(self._prompt.head) + self.audio_length + len(self._prompt.tail) + len(self.tokens)

    @property
    def budget(self) -> int:
        """Tokens that may be generated for what was heard."""
        seconds = self.heard / SAMPLE_RATE
        return BUDGET_BASE + int(BUDGET_PER_SECOND * seconds)

    def ids_after(self, start: int) -> list[int]:
        """Token ids from position ``start``, draft included; sound is ``<|audio_pad|>``."""
        sound = [self._vocabulary.audio_pad] * self.audio_length
        return [*self._prompt.head, *sound, *self._prompt.tail, *self.tokens, *self.draft][start:]

    def cost(self) -> int:
        """Positions that catching up will compute, as far as is known before the sound is encoded."""
        pending = 0
        if self.audio_due:
            pending = geometry.tokens_of(geometry.frames_of(self.samples.length)) - self.audio_length
        return max(1, self.known_length + pending + len(self.draft) - self.kv)

    # ------------------------------------------------------------ what the engine tells

    def first_open_frame(self) -> int:
        return geometry.WINDOW_FRAMES * len(self.windows)

    def hear(self, windows: list[Tensor], open_window: Tensor | None, loudest: Tensor, *, length: int) -> None:
        """New embeddings: windows that closed since, and the open one in place of the last. ``length``: samples covered."""
        self.kv = min(self.kv, len(self.head) + geometry.WINDOW_TOKENS * len(self.windows))
        self.windows += windows
        self.open_window = open_window
        if windows or self.loudest is None:
            self.loudest = loudest
        self.heard = length
        if self._request.temperature == 0:
            self.draft = tuple(self.tokens)
        self.settled = False
        self._begin()

    def accept(self, token: int, score: float, capacity: int) -> None:
        """The next token. May settle the text: end of speech, budget, room in the slot, run-away."""
        if token in self._eos:
            self.settled, self.finish_reason = True, "stop"
            return
        self.tokens.append(token)
        self.scores.append(score)
        self._pieces.append(self._vocabulary.bytes_of(token))
        self._parser.push(token)
        if token == self._vocabulary.text_tag and self._text_from == 0 and not self._language:
            self._text_from = len(self.tokens)
            if self._prefix_ids:
                self._fix_language()
        elif len(self.tokens) >= self.budget or self.known_length >= capacity:
            self.settled, self.finish_reason = True, "length"
        elif len(self.tokens) % CHECK_EVERY == 0 and (found := find_runaway(self.tokens, self._pieces)):
            self.settled, self.finish_reason = True, "repetition"
            self._truncate(found.keep)

    def _fix_language(self) -> None:
        """A prefix waits for the text to begin. The language line and the prefix become part of the prompt."""
        tail = (*self._prompt.tail, *self.tokens, *self._prefix_ids)
        self._prompt = Prompt(self._prompt.head, tail)
        self._language = self._parser.language or "?"
        self._begin()

    def _truncate(self, keep: int) -> None:
        tokens, scores = self.tokens[:keep], self.scores[:keep]
        text_from = self._text_from
        self._begin()
        self.tokens, self.scores, self._text_from = tokens, scores, min(text_from, keep)
        self._pieces = [self._vocabulary.bytes_of(t) for t in tokens]
        self._parser.extend(tokens)

    def leave_slot(self) -> None:
        self.slot, self.kv = None, 0

    def forget(self) -> None:
        """Closed: nothing on the device belongs to it any more."""
        self.closed = True
        self.windows, self.open_window, self.loudest = [], None, None
        self.samples = SampleBuffer()

    def to_host(self) -> None:
        """Embeddings leave the device; they are copied back when they are needed, never computed twice."""
        self.windows = [window.cpu() for window in self.windows]
        self.open_window = None if self.open_window is None else self.open_window.cpu()

    # ------------------------------------------------------------ text

    @property
    def text(self) -> str:
        """The prefix and what was said after it."""
        text, prefix = self._parser.text, self._request.prefix
        if text.startswith(prefix):
            return text
        # White space at the ends of a prefix is not in the tokens; what was emitted stays as it was, to the letter.
        bare = prefix.strip()
        return prefix + text[len(bare) :].lstrip() if text.startswith(bare) and prefix != bare else prefix or text

    @property
    def language(self) -> str:
        """Code of the language asked for or found; empty where there is none."""
        language = self._language or self._parser.language
        return "" if language == "?" or self._parser.no_speech else language

    def worth_showing(self) -> bool:
        """A complete text always; one that is still being decoded only where it goes beyond what was shown last.

        Otherwise readers would see the text shrink and grow again at every update of a call.
        """
        return self.settled or len(self.text) > self._shown

    def show(self) -> str:
        """The text, taken note of as shown."""
        text = self.text
        self._shown = len(text)
        return text

    def final(self) -> Final:
        scores = self.scores[self._text_from :]
        return Final(
            self,
            self.text,
            language=self.language,
            avg_logprob=sum(scores) / len(scores) if scores else None,
            logprobs=self._logprobs() if self._request.logprobs else (),
            finish_reason=self.finish_reason,
        )

    def _logprobs(self) -> tuple[tuple[str, float], ...]:
        """Text and log probability of each token; tokens that share a character are one entry."""
        out: list[tuple[str, float]] = []
        piece, score = b"", 0.0
        for token, value in zip(self.tokens[self._text_from :], self.scores[self._text_from :], strict=True):
            piece, score = piece + self._vocabulary.bytes_of(token), score + value
            try:
                text = piece.decode()
            except UnicodeDecodeError:
                continue
            if text:
                out.append((text, score))
            piece, score = b"", 0.0
        return tuple(out)
