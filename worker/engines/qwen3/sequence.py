"""One stretch of speech inside the engine: its sound, its place in the cache and the text so far.

What the decoder must know is one line of tokens: head, audio, tail, generated. ``kv`` says how much of it is in the slot.
Everything that can happen is a difference between the two: a new sequence (nothing is in), a decode step (one token is
missing), an eviction (nothing is in again), new audio in a call (the open window and what follows are missing), a prefix
that was put in. So there is one way to catch up, and one to go on.

Text that has been said and stays (the request's prefix, what was frozen since) is part of the prompt: its tokens are forced,
and the model goes on after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shared.messages import Lane
from shared.pcm import SAMPLE_RATE
from worker.engines.base import Final, SequenceRequest, Work
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.audio import SampleBuffer
from worker.engines.qwen3.border import border
from worker.engines.qwen3.guard import CHECK_EVERY, kept_of_dense, kept_of_run, visible
from worker.engines.qwen3.parse import OutputParser, scored_text
from worker.engines.qwen3.prompt import Prompt, build_prompt, prefix_tokens
from worker.engines.qwen3.sampling import Mark
from worker.engines.qwen3.verdicts import ENDS, GOES_ON
from worker.engines.qwen3.vocabulary import Vocabulary

LIVE_HOP = 320 * SAMPLE_RATE // 1000
"""New samples after which an open utterance is heard again."""
BUDGET_PER_SECOND = 12
"""Tokens. The fastest speech in the densest script stays under ten."""
BUDGET_BASE = 24


class Qwen3Sequence:
    """State of a sequence; the engine alone changes it."""

    def __init__(self, request: SequenceRequest, vocabulary: Vocabulary) -> None:
        self._request = request
        self._vocabulary = vocabulary
        prefix = request.prefix if request.prefix.strip() else ""
        self._prompt: Prompt = build_prompt(
            vocabulary,
            language=request.language,
            prompt=request.prompt,
            keywords=request.keywords,
            prefix=prefix,
        )
        self._language = request.language
        self._kept = prefix
        """Text that stays: a beginning of every hypothesis and of the final."""
        self._waiting: tuple[int, ...] = ()
        """Tokens of ``_kept`` that wait for the model to name the language, and are put in then."""
        if self._kept and not request.language:
            self._waiting = tuple(prefix_tokens(vocabulary, prefix))
        self._frozen: list[tuple[int, bytes, float]] = []
        """Tokens that the model chose and that are part of the prompt since, with their bytes and scores."""
        self.samples = SampleBuffer()
        self.windows: list[Tensor] = []
        """Embeddings of closed windows, each ``(104, hidden)``; they never change."""
        self.open_window: Tensor | None = None
        self.loudest: Tensor | None = None
        """Running maximum of log power over the closed windows, for the mel floor."""
        self.heard = 0
        """Samples that the embeddings cover."""
        self.audio_length = 0
        """Tokens of sound that the embeddings cover."""
        self._before_text = 0
        """Tokens before the first of ``tokens``; ``_begin`` counts them, after every change of prompt or sound."""
        self.finished = False
        self.paused = False
        """Speech has paused after what was fed."""
        self.closed = False
        self.waits = False
        """Its text is complete, and exact times are not at hand yet."""
        self.slot: int | None = None
        self.kv = 0
        self.arrival = 0
        """Order of seating; the highest is the youngest."""
        self.revision = 0
        """Grows whenever what was said is changed by anything but a further token."""
        self.draft: tuple[int, ...] = ()
        """The last hypothesis, to be verified against the new audio in the pass that catches up."""
        self.settled = False
        """Whether the text for what was heard is complete."""
        self.finish_reason = "stop"
        self.encode_ns = self.prefill_ns = self.decode_ns = 0
        """Of the passes since sound was heard last."""
        self.encoding: tuple[Mark, Mark] | None = None
        """Begin and end of the last encoding, until its time is known."""
        self.windows_encoded = 0
        self._shown = 0
        self._shown_tokens = 0
        """Of the tokens for what was heard, frozen ones included: so many have been shown, and are not taken back."""
        self._begin()

    def _begin(self, tokens: Sequence[int] = (), scores: Sequence[float] = ()) -> None:
        """(Re)start the text after what is kept, with ``tokens`` that are known already."""
        self.revision += 1
        self.tokens: list[int] = list(tokens)
        self.scores: list[float] = list(scores)
        self._before_text = len(self._prompt.head) + self.audio_length + len(self._prompt.tail)
        self._pieces: list[bytes] = [self._vocabulary.bytes_of(token) for token in tokens]
        forced = bool(self._language)
        self._parser = OutputParser(self._vocabulary, forced=forced, after=self._kept if forced else "")
        self._parser.extend(tokens)

    # ------------------------------------------------------------ what the scheduler sees

    @property
    def request(self) -> SequenceRequest:
        return self._request

    @property
    def lane(self) -> Lane:
        return self._request.lane

    @property
    def temperature(self) -> float:
        """Of the next token. What the language is called is not left to chance: the line that names it would come out as text."""
        asked = self._request.temperature
        return asked if asked and self._parser.begun else 0.0

    @property
    def ready(self) -> bool:
        if self.closed or self.waits:
            return False
        return self.finished or (self._request.partials and (self.audio_due or self.decoding))

    # ------------------------------------------------------------ what the engine asks

    @property
    def audio_due(self) -> bool:
        """Whether there is sound to encode before anything else makes sense."""
        new = self.samples.length - self.heard
        if self.finished:
            return new > 0
        return (
            new >= (1 if self.paused else LIVE_HOP)
            and self.samples.length >= geometry.MIN_SAMPLES
            and not self.decoding
        )

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
    def known_length(self) -> int:
        """Tokens before the next one, generated ones included."""
        return self._before_text + len(self.tokens)

    @property
    def said_from(self) -> int:
        """Position of the first token that was said, frozen ones included; a run-away is looked for from there."""
        return self._before_text - len(self._frozen)

    @property
    def budget(self) -> int:
        """Tokens that may be generated for what was heard."""
        seconds = self.heard / SAMPLE_RATE
        return BUDGET_BASE + int(BUDGET_PER_SECOND * seconds)

    def ids_after(self, start: int) -> list[int]:
        """Token ids from position ``start``, draft included; sound is ``<|audio_pad|>``."""
        if self.tokens and not self.draft and start == self.known_length - 1:
            return self.tokens[-1:]
        sound = [self._vocabulary.audio_pad] * self.audio_length
        return [*self._prompt.head, *sound, *self._prompt.tail, *self.tokens, *self.draft][start:]

    def cost(self) -> int:
        """Positions that catching up will compute: with new sound, the open window and what follows it anew."""
        there = min(self.kv, self._closed_length) if self.audio_due else self.kv
        return max(1, self.reach - there)

    @property
    def reach(self) -> int:
        """Positions that the slot will hold when the row has caught up."""
        pending = 0
        if self.audio_due:
            pending = geometry.tokens_of(geometry.frames_of(self.samples.length)) - self.audio_length
        return self.known_length + pending + len(self.draft)

    @property
    def _closed_length(self) -> int:
        """Positions of the head and the closed windows, which new sound does not change."""
        return len(self.head) + geometry.WINDOW_TOKENS * len(self.windows)

    # ------------------------------------------------------------ what the engine tells

    def first_open_frame(self) -> int:
        return geometry.WINDOW_FRAMES * len(self.windows)

    def hear(self, windows: list[Tensor], open_window: Tensor | None, loudest: Tensor, *, length: int) -> None:
        """New embeddings: windows that closed since, and the open one in place of the last. ``length``: samples covered."""
        self.kv = min(self.kv, self._closed_length)
        self.windows += windows
        self.open_window = open_window
        self.audio_length = geometry.WINDOW_TOKENS * len(self.windows)
        self.audio_length += 0 if open_window is None else open_window.shape[0]
        if windows or self.loudest is None:
            self.loudest = loudest
        self.heard = length
        self.encode_ns = self.prefill_ns = self.decode_ns = 0
        if self._request.temperature == 0:
            self.draft = tuple(self.tokens)
        self.settled = False
        self._shown_tokens = 0
        self._begin()

    def accept(self, token: int, score: float, verdict: int, capacity: int) -> None:
        """The next token. May settle the text: end of speech, budget, room in the slot, run-away."""
        if verdict == ENDS:
            self.settled, self.finish_reason = True, "stop"
            return
        self.tokens.append(token)
        self.scores.append(score)
        self._pieces.append(self._vocabulary.bytes_of(token))
        self._parser.push(token)
        count = len(self._frozen) + len(self.tokens)
        if self._waiting and self._parser.begun:
            self._put_prefix_in()
        elif count >= self.budget or self.known_length >= capacity:
            self.settled, self.finish_reason = True, "length"
        elif verdict != GOES_ON:
            self._stop_runaway(kept_of_run(self._line(), verdict))
        elif count % CHECK_EVERY == 0:
            keep = kept_of_dense(self._line(), [*(piece for _, piece, _ in self._frozen), *self._pieces])
            if keep is not None:
                self._stop_runaway(keep)

    def _stop_runaway(self, keep: int) -> None:
        """``keep`` of the tokens were good, frozen ones included; what was shown stays, too."""
        self.settled, self.finish_reason = True, "repetition"
        before = len(self._frozen)
        self._truncate(max(keep, self._shown_tokens, before) - before)

    def _put_prefix_in(self) -> None:
        """A prefix waits for the text to begin. The language line and the prefix become part of the prompt; a model that names no
        language, and begins to speak, begins again behind it."""
        line = self.tokens if self._parser.tagged else []
        if not line:
            self.kv = min(self.kv, self._before_text)
        self._prompt, self._waiting = Prompt(self._prompt.head, (*self._prompt.tail, *line, *self._waiting)), ()
        self._language = self._parser.language or "?"
        self._begin()

    def _truncate(self, keep: int) -> None:
        self._begin(self.tokens[:keep], self.scores[:keep])

    def freeze(self, text: str) -> None:
        """``text``, a beginning of the last hypothesis, stays: its tokens become part of the prompt.

        They are the hypothesis' own tokens up to the border. Where ``text`` ends inside a token, its rest is tokenised
        anew, and what followed is decoded again. Raises ValueError for a text that does not begin with what stays already.
        """
        if not text.startswith(self._kept):
            raise ValueError("What was said cannot be changed.")
        more, self._kept = text[len(self._kept) :], text
        if self._waiting:
            self._waiting = tuple(prefix_tokens(self._vocabulary, text))
        elif more.strip():
            self._freeze(more)

    def _freeze(self, more: str) -> None:
        # A draft that has not been verified yet stands for the last hypothesis.
        line, scores = (self.tokens, self.scores) if self.tokens else (list(self.draft), [0.0] * len(self.draft))
        start = self._after_language(line)
        pieces = [self._vocabulary.bytes_of(token) for token in line]
        count, missing = border(pieces[start:], more)
        stop = start + count
        self._frozen += zip(line[start:stop], pieces[start:stop], scores[start:stop], strict=True)
        added = self._vocabulary.encode(missing)
        if added:
            score = scores[min(stop, len(scores) - 1)] if scores else 0.0
            self._frozen += [(token, self._vocabulary.bytes_of(token), score) for token in added]
            self.kv = min(self.kv, len(self.head) + self.audio_length + len(self._prompt.tail) + stop)
            self.settled = False
            line, scores = line[:stop], scores[:stop]
        self._prompt = Prompt(self._prompt.head, (*self._prompt.tail, *line[:stop], *added))
        if self.draft:
            self.draft = tuple(line[stop:])
            self._begin()
        else:
            self._begin(line[stop:], scores[stop:])

    def _after_language(self, line: Sequence[int]) -> int:
        """Where the text begins in ``line``; the language that stands before it is fixed from now on."""
        if self._language:
            return 0
        self._language = OutputParser(self._vocabulary, forced=False).extend(line).language or "?"
        tag = self._vocabulary.text_tag
        return line.index(tag) + 1 if tag in line else 0

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
        """What stays and what was said after it."""
        if self._kept and not self._language:
            return self._kept
        cut = self.settled and self.finish_reason != "stop"
        return self._parser.text_if_cut if cut else self._parser.text

    @property
    def _text_so_far(self) -> str:
        return self._parser.text_so_far if self._language or not self._kept else self._kept

    @property
    def language(self) -> str:
        """Code of the language asked for or found; empty where there is none."""
        language = self._language or self._parser.language
        return "" if language == "?" or self._parser.no_speech else language

    def news(self) -> str | None:
        """A hypothesis worth showing, taken note of as shown; None if there is none.

        Of an open utterance only a complete text is: who waits for two hypotheses to agree must not be told one twice, and
        readers of a call would see the text shrink and grow again at every update. Where all sound is there, every token is
        that goes beyond what was shown. What may be a run-away is held back.
        """
        if not self.settled and not self.finished:
            return None
        count = len(self._frozen) + len(self.tokens)
        shown = count if self.settled else visible(self._line())
        if shown < count:
            return self._news_of(shown) if shown > self._shown_tokens else None
        text = self.text if self.settled else self._text_so_far
        if not self.settled and len(text) <= self._shown:
            return None
        self._shown, self._shown_tokens = len(text), count
        return text

    def _line(self) -> list[int]:
        return [*(token for token, _, _ in self._frozen), *self.tokens] if self._frozen else self.tokens

    def _news_of(self, count: int) -> str | None:
        """Text of so many tokens, frozen ones included, if it goes beyond what was shown."""
        forced = bool(self._language)
        parser = OutputParser(self._vocabulary, forced=forced, after=self._kept if forced else "")
        text = parser.extend(self.tokens[: max(0, count - len(self._frozen))]).text_so_far
        if len(text) <= self._shown:
            return None
        self._shown, self._shown_tokens = len(text), count
        return text

    def final(self) -> Final:
        scores = [score for _, _, score in self._frozen] + [self.scores[number] for number in self._parser.spoken]
        return Final(
            self,
            self.text,
            language=self.language,
            avg_logprob=sum(scores) / len(scores) if scores else None,
            logprobs=scored_text((piece, score) for _, piece, score in self._frozen)
            + self._parser.scored(self.scores, self.text),
            finish_reason=self.finish_reason,
            work=Work(self.encode_ns, self.prefill_ns, self.decode_ns, self.windows_encoded),
        )
