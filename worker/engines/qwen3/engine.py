"""Continuous batching for Qwen3-ASR: sequences join and leave between steps, live rows first.

A step is one pass that *catches up* a few rows (encode new sound, fill the slot, verify a draft, first new token); rows that
need just their next token ride along. Where no row is behind, the step is theirs alone. Nothing else happens, so a step is
bounded by the size of a group, and a neighbour never waits for more than one. Who is in a step, ``turns`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.errors import AudioTooLong, BadRequest, EngineFailed, ModelLoadFailed, NapscribeError, OutOfMemory
from shared.journal import log
from shared.languages import NAMES
from shared.messages import Capabilities, Lane
from worker.audio.samples import Audio
from worker.engines.base import EngineEvent, EngineSequence, Hypothesis, Report, SequenceFailed, SequenceRequest
from worker.engines.qwen3 import device as devices
from worker.engines.qwen3.aligner import aligner_bytes
from worker.engines.qwen3.catch_up import CatchUp, seat
from worker.engines.qwen3.checkpoint import open_checkpoint
from worker.engines.qwen3.decoder import Decoder, TextShape
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.exact_times import ExactTimes
from worker.engines.qwen3.forward import Forward
from worker.engines.qwen3.hub import MODEL, Setting
from worker.engines.qwen3.mel import LogMel
from worker.engines.qwen3.passes import Passes
from worker.engines.qwen3.sampling import Chosen, LogitsToTokens, greedy, sampled
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.slots import SlotTable
from worker.engines.qwen3.turns import Turn, Turns
from worker.engines.qwen3.verdicts import Verdicts
from worker.engines.qwen3.vocabulary import load_vocabulary
from worker.engines.qwen3.weights import Recogniser, load_recogniser

MAX_SEGMENT_S = 30.0
SLOT_LENGTH = 1280
"""Positions: 30 s of sound (390), a full context (512), the turns (about 20) and a budget near 360 tokens."""
MIN_ANSWER = 16
"""Positions that must be left for text, or the sound does not fit."""
MAX_SLOTS = {"cuda": 384, "cpu": 8}
MAX_CALLS = 300
"""Calls that are taken, whatever the slots: with 380, the host's work for each of them keeps one core busy, and some are seconds late
(``docs/benchmarks.md``)."""
SEATS_BEFORE_ALIGNER = 8
MAX_STEP_S = {"cuda": 20.0, "cpu": 60.0}
"""A first pass on a loaded machine; a step of the usual kind is far below."""

LogitsHook = Callable[[Tensor, Sequence[EngineSequence]], Tensor]
"""``hook(logits, sequences)`` with logits ``(rows, vocabulary)``; returns the logits to choose from."""


class Qwen3Engine:
    """The engine contract (``worker.engines.base``) over a Qwen3-ASR checkpoint.

    ``model``: folder or hub id. ``device``, ``dtype``, ``threads``: empty, None and 0 choose. ``near_gpu``: see ``device.set_up``. ``gpu_memory_mb`` bounds
    weights, slots and working memory; 0 takes what is free, or ``memory_share`` of it. ``max_slots``: an upper bound on slots, 0 for the default.
    ``aligner``: folder or hub id of a forced aligner, loaded when the first request asks for words; empty for none. ``wake`` is
    called from another thread when a row that waited for it has become ready. ``setting``: which named the model.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "",
        dtype: torch.dtype | None = None,
        gpu_memory_mb: int = 0,
        memory_share: float = 1.0,
        max_slots: int = 0,
        slot_length: int = SLOT_LENGTH,
        threads: int = 0,
        near_gpu: bool = False,
        graphs: bool = True,
        aligner: str = "",
        wake: Callable[[], None] = lambda: None,
        setting: Setting = MODEL,
    ) -> None:
        self._model_name = model
        self._setting = setting
        self._want = (device, dtype, threads, near_gpu)
        self._gpu_memory = (gpu_memory_mb, memory_share)
        self._max_slots = max_slots
        self._slot_length = slot_length
        self._graphs = graphs
        self._aligner_name = aligner
        self._wake = wake
        self.logits_hook: LogitsHook | None = None
        """For tests: changes the logits of every pass before a token is chosen. Rules out CUDA graphs while it is set."""

    # ------------------------------------------------------------ life

    @torch.inference_mode()
    def load(self, report: Report) -> Capabilities:
        report("loading", 0.0)
        where, dtype, threads, near_gpu = self._want
        self._device = devices.set_up(where, dtype=dtype, threads=threads, near_gpu=near_gpu)
        checkpoint = open_checkpoint(self._model_name, report, self._setting)
        report("loading", 0.1)
        chunks = devices.encoder_chunks(self._device, self._gpu_memory[0])
        with devices.typed_out_of_memory("loading the weights"):
            model = load_recogniser(checkpoint, self._device.where, self._device.dtype, report)
            report("loading", 0.8)
            self._vocabulary = load_vocabulary(checkpoint)
            report("loading", 0.9)
            self.encoder = Encoder(model, chunks_at_once=chunks)
            self._slots = self._count_slots(model, chunks)
            # Only now: where not even the weights fit, counting says so.
            devices.bound_memory(self._device, self._gpu_memory[0])
            self.decoder = Decoder(
                model.model.language_model, model.lm_head.weight, slots=self._slots, length=self._slot_length
            )
        with devices.typed_out_of_memory("warming up"):
            self._mel = LogMel(self._device.where)
            self._forward = Forward(
                self.decoder,
                Verdicts(
                    slots=self._slots,
                    length=self._slot_length,
                    ends=checkpoint.eos | {self._vocabulary.turn_end, self._vocabulary.end_of_text},
                    device=self._device.where,
                    fused=self.decoder.fused,
                ),
            )
            self._table = SlotTable(self._slots)
            self._turns = Turns(self._device.where.type)
            self._exact_times = ExactTimes(self._aligner_name, self._device, self._wake)
            self._catch_up = CatchUp(self._mel, self.encoder, self.decoder, self._forward, self._vocabulary)
            self._passes = Passes(self._device, self._catch_up, self._chooser, self._advance, self._fail)
            self._generator = torch.Generator(self._device.where)
            self._warm_up(report)
        return self._capabilities()

    def _count_slots(self, model: Recogniser, chunks: int | None) -> int:
        kind = self._device.where.type
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        shape = TextShape.of(model.config.text_config)
        bound_mb, share = self._gpu_memory
        room = devices.free_bytes(self._device, bound_mb=bound_mb, held=weights, share=share, chunks=chunks)
        slot = shape.slot_bytes(self._slot_length, self._device.dtype)
        if self._device.cuda and self._aligner_name:
            without = room - aligner_bytes(self._aligner_name)
            # On a small card that nobody has bound, seats are worth more than exact times.
            room = without if bound_mb or without >= SEATS_BEFORE_ALIGNER * slot else room
        affordable = room // slot
        if affordable < 1:
            raise ModelLoadFailed(
                f"The weights take {weights >> 20} MB, and nothing is left for a single sequence.",
                hint="Raise NAPSCRIBE_GPU_MEMORY_MB, stop other programs on the card, choose the 0.6B model, "
                "or set NAPSCRIBE_ALIGNER=none.",
            )
        return int(min(affordable, self._max_slots or MAX_SLOTS.get(kind, 8)))

    def _capabilities(self) -> Capabilities:
        kind = self._device.where.type
        return Capabilities(
            engine="qwen3",
            model=self._model_name,
            languages=tuple(NAMES),
            # One slot stays with files, so that calls can slow them down but never shut them out for want of a seat.
            max_live=max(1, min(self._slots - 1, MAX_CALLS)),
            max_batch=self._slots,
            accepts_prefix=True,
            streams_natively=False,
            translates=False,
            word_times="exact" if self._aligner_name else "estimated",
            max_segment_s=MAX_SEGMENT_S,
            max_step_s=MAX_STEP_S.get(kind, 60.0),
            device=str(self._device.where),
            slots=self._slots,
        )

    def _warm_up(self, report: Report) -> None:
        """Record the graphs, then run noise and silence at real shapes, so that no first caller pays for it."""
        report("warming", 0.0)
        if self._device.cuda and self._graphs:
            pool = torch.cuda.graph_pool_handle()
            self._forward.record(pool, lambda share: report("warming", 0.5 * share))
            self.encoder.record(pool, lambda share: report("warming", 0.5 + 0.3 * share))
            if not self._forward.recorded:
                log(
                    "Triton does not run here, so nothing is recorded and every pass is many times slower",
                    level="warning",
                    hint="Install gcc and the C library's headers, and the triton that belongs to torch.",
                )
        seconds = (0.5, 4.0, 8.0, 30.0) if self._device.cuda else (1.0,)
        noise = torch.Generator().manual_seed(0)
        for count, duration in enumerate(seconds):
            report("warming", 0.8 + 0.2 * count / len(seconds))
            length = int(duration * 16_000)
            for audio in (0.05 * torch.randn(length, generator=noise), torch.zeros(length)):
                sequence = self.open(SequenceRequest("warm-up", Lane.BATCH, language="en"))
                self.feed(sequence, audio.numpy())
                self.finish(sequence)
                for _ in range(3):
                    if not sequence.closed:
                        _require_work(self.step([sequence], 0))
                self.cancel(sequence)
        self.encoder.encoded = 0

    def close(self) -> None:
        """Drop weights, slots and graphs."""
        parts = (
            "encoder",
            "decoder",
            "_mel",
            "_forward",
            "_table",
            "_catch_up",
            "_passes",
            "_vocabulary",
            "_exact_times",
        )
        for name in parts:
            self.__dict__.pop(name, None)
        if hasattr(self, "_device"):
            devices.release_cached(self._device)

    @property
    def device_memory(self) -> int:
        """Bytes held on the accelerator."""
        return devices.held_bytes(self._device) if hasattr(self, "_device") else 0

    @property
    def positions(self) -> int:
        """Positions that catching up has computed since the start."""
        return self._catch_up.positions

    @property
    def evictions(self) -> int:
        return self._table.evictions

    # ------------------------------------------------------------ sequences

    def open(self, request: SequenceRequest) -> Qwen3Sequence:
        if request.language and request.language not in NAMES:
            raise BadRequest(f"Qwen3-ASR does not know the language {request.language!r}.", param="language")
        return Qwen3Sequence(request, self._vocabulary)

    def feed(self, sequence: EngineSequence, audio: Audio) -> None:
        mine = _own(sequence)
        mine.samples.append(audio)
        mine.paused = False

    def finish(self, sequence: EngineSequence) -> None:
        _own(sequence).finished = True

    def freeze(self, sequence: EngineSequence, text: str) -> None:
        _own(sequence).freeze(text)

    def pause(self, sequence: EngineSequence) -> None:
        _own(sequence).paused = True

    def suspend(self, sequence: EngineSequence) -> None:
        mine = _own(sequence)
        self._table.release(mine)
        mine.to_host()

    def cancel(self, sequence: EngineSequence) -> None:
        mine = _own(sequence)
        self._table.release(mine)
        mine.forget()

    # ------------------------------------------------------------ steps

    def step(self, rows: Sequence[EngineSequence], deadline_ns: int) -> list[EngineEvent]:
        """See the contract. Rows beyond the free slots wait; ``deadline_ns`` is not needed, because live rows go first."""
        with devices.watched(self._device):
            return self._step(rows)

    @torch.inference_mode()
    def _step(self, rows: Sequence[EngineSequence]) -> list[EngineEvent]:
        devices.claim_threads(self._device)
        mine = [row for row in map(_own, rows) if row.ready]
        calls_first = self._turns.calls_first(mine)
        events = self._end_all([row for row in mine if row.done], calls_first)
        seated = [row for row in mine if not (row.closed or row.done) and self._table.seat(row)]
        behind: list[Qwen3Sequence] = []
        current: list[Qwen3Sequence] = []
        for row in seated:
            # A seat may have been taken from a row of a lower lane since.
            if row.slot is not None:
                (behind if row.behind else current).append(row)
        if behind or current:
            turn = self._turns.next(behind, current, calls_first=calls_first, calls_seated=bool(self._table.calls))
            events += self._take(turn, current)
        return events

    def _take(self, turn: Turn, current: list[Qwen3Sequence]) -> list[EngineEvent]:
        """One pass. Files beside calls: half of one, because calls may have to wait for it."""
        events: list[EngineEvent] = []
        group = [row for row in turn.group if self._fits(row, events)]
        if turn.files_beside_calls and group:
            heard = [row for row in group if not row.audio_due]
            if not heard:
                return events + self._passes.listen(group)
            group = heard
        if group or turn.riders:
            events += self._passes.run(group, turn.riders, current)
        return events

    def _fits(self, row: Qwen3Sequence, events: list[EngineEvent]) -> bool:
        """Whether its sound and some text have room in a slot; else it fails."""
        if row.audio_due and row.reach + MIN_ANSWER > self.decoder.scratch:
            events.append(self._fail(row, _too_long()))
            return False
        return True

    def _chooser(self, rows: Sequence[Qwen3Sequence]) -> LogitsToTokens | None:
        """How tokens of these rows are chosen: None for plain greedy, which may run as a graph."""
        heat = [row.temperature for row in rows]
        hook = self.logits_hook
        if hook is None and not any(heat):
            return None

        def choose(logits: Tensor) -> Tensor:
            changed = hook(logits, rows) if hook else logits
            return sampled(changed, heat, self._generator) if any(heat) else greedy(changed)

        return choose

    def _advance(self, rows: Sequence[Qwen3Sequence], results: Sequence[Chosen]) -> list[EngineEvent]:
        """Give each row its new tokens; say what there is to say."""
        events: list[EngineEvent] = []
        for row, chosen in zip(rows, results, strict=True):
            if not all(map(math.isfinite, chosen.logprobs)):
                self.decoder.clear(seat(row))
                failure = EngineFailed("The model's numbers overflowed on this recording.")
                events.append(self._fail(row, failure))
                continue
            for token, score, verdict in zip(*chosen, strict=True):
                if not row.settled:
                    row.accept(token, score, verdict, self.decoder.scratch)
            if row.done and not self._exact_times.wanted(row):
                events.append(self._end(row))
            elif row.request.partials and (text := row.news()) is not None:
                events.append(Hypothesis(row, text))
        return events

    def _end_all(self, done: list[Qwen3Sequence], calls_first: bool) -> list[EngineEvent]:
        """Finals of complete rows; of those that want exact times, one a step, because each is a pass of its own. Files wait with
        that for calls that have work."""
        waiting = [row for row in done if self._exact_times.wanted(row)]
        undecided = [row for row in waiting if not self._exact_times.decided(row)]
        for row in undecided:
            self._table.release(row)  # a text that is complete needs no seat
        done = [row for row in done if row not in undecided]
        waiting = [row for row in waiting if row not in undecided]
        first = next((row for row in waiting if row.lane is Lane.LIVE or not calls_first), None)
        return [self._end(row) for row in done if row is first or row not in waiting]

    def _end(self, row: Qwen3Sequence) -> EngineEvent:
        final = row.final()
        if self._exact_times.wanted(row):
            final = replace(final, words=self._exact_times.of(row, final.text))
        self._table.release(row)
        row.forget()
        return final

    def _fail(self, row: Qwen3Sequence, error: NapscribeError) -> EngineEvent:
        self._table.release(row)
        row.forget()
        return SequenceFailed(row, error)


def _require_work(events: Sequence[EngineEvent]) -> None:
    """Raises ModelLoadFailed, OutOfMemory: a model that fails on noise and on silence would fail on everything."""
    for event in events:
        if isinstance(event, SequenceFailed):
            if isinstance(event.error, OutOfMemory):
                raise event.error
            raise ModelLoadFailed(f"The model does not run: {event.error.message}", hint=event.error.hint)


def _own(sequence: EngineSequence) -> Qwen3Sequence:
    if not isinstance(sequence, Qwen3Sequence):
        raise TypeError(f"not a sequence of this engine: {type(sequence).__name__}")
    return sequence


def _too_long() -> AudioTooLong:
    return AudioTooLong(
        "The segment does not fit into the model's context.",
        hint=f"Segments are at most {MAX_SEGMENT_S:.0f} s; a shorter prompt leaves more room.",
    )
