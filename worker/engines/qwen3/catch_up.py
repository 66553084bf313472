"""One pass that brings a group of rows up to date: encode what is new, fill the slots, verify drafts, first new token.

All tokens of a draft are checked at once: the pass yields the model's choice after every draft token, and the draft holds as
far as it agrees with them. So the result is what decoding one by one would give, in one pass where nothing changed
(speculative decoding, Leviathan et al. 2023, with the last hypothesis for a draft model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.engines.qwen3 import geometry
from worker.engines.qwen3.decoder import Decoder
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.graphs import Recordings, bucket
from worker.engines.qwen3.mel import LogMel
from worker.engines.qwen3.sampling import Landing, Mark, greedy
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.stepper import LogitsToTokens
from worker.engines.qwen3.vocabulary import Vocabulary

_LOGITS_AT_ONCE = 256
"""Rows of logits that exist at a time: 150 MB in float32 at the published vocabulary."""
_CPU_SPAN = 64

_GRAPH_ROWS = (1, 4, 8, 16, 24, 32, 48, 64)
_GRAPH_WIDTHS = (32, 64, 96, 128, 160, 192)
_GRAPH_POSITIONS = 4096
"""Of rows times width, in one recorded pass: some 14 ms for the 0.6B model on an H100."""
_GRAPH_SPANS = (256, 512)
_SHORT_SPAN_ROWS = 16
"""Fewer rows are not recorded with the short span: they read too little for it to matter."""

Chooser = Callable[[Sequence[Qwen3Sequence]], LogitsToTokens | None]
Script = Callable[[Qwen3Sequence, int], list[int]]
"""``script(row, count)``: the next ``count`` tokens of a row."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that has been launched. Its rows must not change until it has landed."""

    group: Sequence[Qwen3Sequence]
    begin: Mark
    encoded: Mark
    landing: Landing


class CatchUp:
    """Holds the parts of the model; keeps nothing between passes."""

    def __init__(self, mel: LogMel, encoder: Encoder, decoder: Decoder, vocabulary: Vocabulary) -> None:
        self._mel = mel
        self._encoder = encoder
        self._decoder = decoder
        self._vocabulary = vocabulary
        self._graphs: Recordings | None = None
        self.script: Script | None = None
        """For benchmarks: says what the model shall have chosen, after every pass, which costs what it costs."""
        self.positions = 0
        """Positions computed since the start, padding left out: what calls and evictions cost."""

    def run(self, group: Sequence[Qwen3Sequence], chooser: Chooser) -> list[tuple[list[int], list[float]]]:
        """Launch and land."""
        return self.land(self.launch(group, chooser))

    def launch(self, group: Sequence[Qwen3Sequence], chooser: Chooser) -> Flight:
        """Give the device everything there is to do for ``group``, and wait for nothing. Rows need slots, all fresh or none.

        Only the rows' embeddings change, which are right whatever becomes of the pass.
        """
        begin = Mark(self._decoder.device)
        self.listen([row for row in group if row.audio_due])
        encoded = Mark(self._decoder.device)
        ids = [row.ids_after(row.kv) for row in group]
        self.positions += sum(map(len, ids))
        hidden = self._fill(group, ids)
        places = [
            len(line) - 1 - len(row.draft) + i
            for row, line in zip(group, ids, strict=True)
            for i in range(1 + len(row.draft))
        ]
        owners = [n for n, row in enumerate(group) for _ in range(1 + len(row.draft))]
        return Flight(group, begin, encoded, Landing(self._choose(hidden, owners, places, group, chooser)))

    def land(self, flight: Flight) -> list[tuple[list[int], list[float]]]:
        """New tokens and their log probabilities for each row, at least one."""
        group = flight.group
        tokens, scores = flight.landing.unpack()
        encode_ns, prefill_ns = flight.encoded.since(flight.begin), flight.landing.there.since(flight.encoded)
        for row in group:
            row.encode_ns += encode_ns
            row.prefill_ns += prefill_ns
        if self.script is not None:
            tokens = [token for row in group for token in self.script(row, 1 + len(row.draft))]
        results, at = [], 0
        for row in group:
            count = 1 + len(row.draft)
            agreed = _agreement(row.draft, tokens[at : at + count])
            results.append((tokens[at : at + agreed + 1], scores[at : at + agreed + 1]))
            row.kv = row.known_length + agreed
            row.draft = ()
            at += count
        return results

    def listen(self, rows: Sequence[Qwen3Sequence]) -> None:
        """Encode the sound of ``rows`` that has no final embedding yet: windows that closed, and the open one."""
        if not rows:
            return
        lengths = [row.samples.length for row in rows]
        spans = [(row.first_open_frame(), geometry.frames_of(n)) for row, n in zip(rows, lengths, strict=True)]
        clips = [row.samples.for_frames(*span) for row, span in zip(rows, spans, strict=True)]
        counts = [last - first for first, last in spans]
        mel = self._mel(clips, counts, [row.loudest for row in rows])
        per_clip = mel.features.shape[-1] // geometry.WINDOW_FRAMES
        windows = mel.features.reshape(len(rows), geometry.MELS, per_clip, geometry.WINDOW_FRAMES)
        windows = windows.transpose(1, 2).flatten(0, 1)
        picked, frames = _windows(counts, per_clip)
        index = torch.tensor(picked).to(windows.device, non_blocking=True)
        embeddings = iter(self._encoder(windows[index], frames))
        for n, row in enumerate(rows):
            row.windows_encoded += -(-counts[n] // geometry.WINDOW_FRAMES)
            parts = [next(embeddings) for _ in range(-(-counts[n] // geometry.WINDOW_FRAMES))]
            closed = geometry.closed_windows(lengths[n], finished=row.finished) - len(row.windows)
            row.hear(parts[:closed], parts[closed] if len(parts) > closed else None, mel.loudest[n], length=lengths[n])

    def _fill(self, group: Sequence[Qwen3Sequence], ids: list[list[int]]) -> Tensor:
        """Hidden states ``(rows, widest, hidden)`` of the missing positions, which the slots hold afterwards."""
        decoder = self._decoder
        widest = max(map(len, ids))
        padded = torch.tensor([line + [self._vocabulary.end_of_text] * (widest - len(line)) for line in ids])
        embeddings = decoder.embed(padded.to(decoder.device, non_blocking=True))
        for n, row in enumerate(group):
            _place_sound(embeddings[n], row)
        slots = torch.tensor([row.slot for row in group]).to(decoder.device, non_blocking=True)
        starts = torch.tensor([row.kv for row in group]).to(decoder.device, non_blocking=True)
        reach = max(row.kv + len(line) for row, line in zip(group, ids, strict=True))
        if (shape := self._shape(len(group), widest, reach)) is not None:
            return self._replay(shape, embeddings, slots, starts)
        if all(row.kv == 0 for row in group):
            return decoder.prefill(embeddings, slots)
        span = min(-(-reach // _CPU_SPAN) * _CPU_SPAN, decoder.length)
        return decoder.extend(embeddings, slots, starts, span)

    def record(self, pool: Any, report: Callable[[float], None]) -> None:
        """Record passes over slots that hold something, as calls need them; ``report`` gets the share that is done."""
        decoder = self._decoder
        self._graphs = Recordings(pool)
        shapes = [
            (rows, width, span)
            for rows in reversed(_GRAPH_ROWS)
            if rows <= decoder.slots
            for width in reversed(_GRAPH_WIDTHS)
            if rows * width <= _GRAPH_POSITIONS
            for span in reversed(_GRAPH_SPANS)
            if span < decoder.length and (rows >= _SHORT_SPAN_ROWS or span == _GRAPH_SPANS[-1])
        ]
        for number, (rows, width, span) in enumerate(shapes):
            report(number / len(shapes))
            embeddings = torch.zeros(rows, width, decoder.shape.hidden, device=decoder.device, dtype=decoder.dtype)
            slots = torch.zeros(rows, dtype=torch.long, device=decoder.device)
            starts = torch.full((rows,), decoder.scratch, device=decoder.device)
            self._graphs.record((rows, width, span), (embeddings, slots, starts), _extend(decoder, span))

    def width_class(self, width: int) -> int | None:
        """Which width a row is padded to in a recorded pass; None where it is too wide for one, or none is recorded."""
        return bucket(_GRAPH_WIDTHS, width) if self._graphs else None

    def _shape(self, rows: int, width: int, reach: int) -> tuple[int, int, int] | None:
        """Of the recorded pass that would do."""
        if self._graphs is None:
            return None
        size = bucket(_GRAPH_ROWS, rows) or 0, bucket(_GRAPH_WIDTHS, width) or 0
        return next(((*size, s) for s in _GRAPH_SPANS if s >= reach and (*size, s) in self._graphs), None)

    def _replay(self, shape: tuple[int, int, int], embeddings: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """Rows beyond the group write to scratch, as padding does."""
        assert self._graphs is not None
        rows, width, _ = embeddings.shape
        to_embeddings, to_slots, to_starts = self._graphs.inputs(shape)
        to_embeddings[:rows, :width].copy_(embeddings)
        to_slots[:rows].copy_(slots)
        to_starts[:rows].copy_(starts)
        to_starts[rows:].fill_(self._decoder.scratch)
        return self._graphs.replay(shape)[:rows, :width]

    def _choose(
        self, hidden: Tensor, owners: list[int], places: list[int], group: Sequence[Qwen3Sequence], chooser: Chooser
    ) -> Tensor:
        """Packed tokens."""
        index = torch.tensor([owners, places]).to(hidden.device, non_blocking=True)
        wanted = hidden[index[0], index[1]]
        packed = []
        for at in range(0, len(owners), _LOGITS_AT_ONCE):
            part = slice(at, at + _LOGITS_AT_ONCE)
            choose = chooser([group[n] for n in owners[part]]) or greedy
            packed.append(choose(self._decoder.logits(wanted[part])))
        return torch.cat(packed, dim=1)


def _extend(decoder: Decoder, span: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda embeddings, slots, starts: decoder.extend(embeddings, slots, starts, span)


def fits_a_recording(rows: int, width: int) -> bool:
    """Whether so many rows of a class are not too much for one recorded pass."""
    padded = bucket(_GRAPH_ROWS, rows)
    return padded is not None and padded * width <= _GRAPH_POSITIONS


def _windows(counts: list[int], per_clip: int) -> tuple[list[int], list[int]]:
    """Places of real windows among ``per_clip`` a clip, and their frames."""
    picked, frames = [], []
    for clip, count in enumerate(counts):
        for window in range(-(-count // geometry.WINDOW_FRAMES)):
            picked.append(clip * per_clip + window)
            frames.append(min(geometry.WINDOW_FRAMES, count - window * geometry.WINDOW_FRAMES))
    return picked, frames


def _place_sound(embeddings: Tensor, row: Qwen3Sequence) -> None:
    """Put a row's sound over its placeholders; ``embeddings`` begins at position ``row.kv``."""
    at = len(row.head) - row.kv
    for part in [*row.windows, *([] if row.open_window is None else [row.open_window])]:
        if at >= 0:
            embeddings[at : at + len(part)] = part
        elif at + len(part) > 0:
            embeddings[: at + len(part)] = part[-at:]
        at += len(part)


def _agreement(draft: tuple[int, ...], chosen: list[int]) -> int:
    """Leading tokens of the draft that the model would have chosen itself."""
    for n, token in enumerate(draft):
        if chosen[n] != token:
            return n
    return len(draft)
