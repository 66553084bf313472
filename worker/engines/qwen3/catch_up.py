"""One pass that brings rows up to date: encode what is new, fill the slots, verify drafts, choose the next token.

All tokens of a draft are checked at once: the pass yields the model's choice after every draft token, and the draft holds as
far as it agrees with them. So the result is what decoding one by one would give, in one pass where nothing changed
(speculative decoding, Leviathan et al. 2023, with the last hypothesis for a draft model). A row that lacks nothing but its
next token is the smallest case of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engines.qwen3 import geometry
from worker.engines.qwen3.decoder import Decoder
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.forward import Forward
from worker.engines.qwen3.layout import Piece, spots_of, upload
from worker.engines.qwen3.mel import LogMel
from worker.engines.qwen3.sampling import Chosen, Landing, LogitsToTokens, Mark, greedy
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.vocabulary import Vocabulary

_LOGITS_AT_ONCE = 256
"""Rows of logits that exist at a time: 150 MB in float32 at the published vocabulary."""

Chooser = Callable[[Sequence[Qwen3Sequence]], LogitsToTokens | None]
Results = Sequence[Chosen]
"""New tokens, by row."""
Script = Callable[[Qwen3Sequence, int], Chosen]
"""``script(row, count)``: the next ``count`` tokens of a row."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that has been launched. Its rows must not change until it has landed, unless it was launched ahead."""

    group: Sequence[Qwen3Sequence]
    pieces: Sequence[Piece]
    revisions: Sequence[int]
    """Of the rows, when it was launched."""
    decoding: Sequence[bool]
    """Of each row: whether it lacked only its next token."""
    begin: Mark
    packed: Tensor
    """Tokens and verdicts on the device, of a decoding pass a copy that no later pass overwrites."""
    landing: Landing

    def holds(self, n: int) -> bool:
        """Whether row ``n``, which lacked only its next token, still stands where it stood when that was computed."""
        row, piece = self.group[n], self.pieces[n]
        if row.closed or row.behind or not row.decoding or row.revision != self.revisions[n]:
            return False
        return (row.slot, row.kv) == (piece.slot, piece.start)


class CatchUp:
    """Holds the parts of the model; keeps nothing between passes."""

    def __init__(
        self, mel: LogMel, encoder: Encoder, decoder: Decoder, forward: Forward, vocabulary: Vocabulary
    ) -> None:
        self._mel = mel
        self._encoder = encoder
        self._decoder = decoder
        self._forward = forward
        self._vocabulary = vocabulary
        self.script: Script | None = None
        """For benchmarks: says what the model shall have chosen, after every pass, which costs what it costs."""
        self.positions = 0
        """Positions computed since the start for rows that were behind: what calls and evictions cost."""

    def run(self, group: Sequence[Qwen3Sequence], chooser: Chooser) -> Results:
        """Launch and land."""
        return self.land(self.launch(group, chooser))

    def launch(self, group: Sequence[Qwen3Sequence], chooser: Chooser) -> Flight:
        """Give the device everything there is to do for ``group``, and wait for nothing. Rows need slots.

        Only the rows' embeddings change, which are right whatever becomes of the pass.
        """
        decoding = [not row.behind for row in group]
        if due := [row for row in group if row.audio_due]:
            self.listen(due)
        begin = Mark(self._decoder.device)
        ids = [row.ids_after(row.kv) for row in group]
        self.positions += sum(len(line) for line, next_only in zip(ids, decoding, strict=True) if not next_only)
        pieces = [Piece(seat(row), row.kv, len(line), row.said_from) for row, line in zip(group, ids, strict=True)]
        if all(decoding) and chooser(group) is None:
            packed = self._forward.next_tokens([line[0] for line in ids], pieces).clone()
        else:
            packed = self._choose(self._fill(group, ids, pieces), group, pieces, chooser)
        return Flight(group, pieces, _revisions(group), decoding, begin, packed, Landing(packed))

    def launch_ahead(self, group: Sequence[Qwen3Sequence], before: Flight) -> Flight:
        """The next tokens of rows that ``before``, in which all rows lack just one, is still computing, and of others.

        What the former will be given stays on the device, where this pass finds it. The host learns it meanwhile; where that
        ends or changes a row, the result of this pass does not hold for it.
        """
        begin = Mark(self._decoder.device)
        places = {id(row): n for n, row in enumerate(before.group) if before.holds(n)}
        chained = [(n, places[id(row)]) for n, row in enumerate(group) if id(row) in places]
        ids = [0 if id(row) in places else row.ids_after(row.kv)[0] for row in group]
        pieces = [Piece(seat(row), row.kv + (id(row) in places), 1, row.said_from) for row in group]
        packed = self._forward.next_tokens(ids, pieces, after=(before.packed, chained)).clone()
        return Flight(group, pieces, _revisions(group), [True] * len(group), begin, packed, Landing(packed))

    def land_ahead(self, flight: Flight, rows: Sequence[Qwen3Sequence]) -> tuple[list[Qwen3Sequence], Results]:
        """Those of ``rows`` for which the flight holds, with their tokens."""
        chosen = flight.landing.unpack()
        wanted = set(map(id, rows))
        good = [n for n, row in enumerate(flight.group) if id(row) in wanted and flight.holds(n)]
        group = [flight.group[n] for n in good]
        pass_ns = flight.landing.there.since(flight.begin)
        for row in group:
            row.decode_ns += pass_ns
            row.kv += 1
        if self.script is not None:
            return group, [self.script(row, 1) for row in group]
        return group, [chosen.part(n, n + 1) for n in good]

    def land(self, flight: Flight) -> Results:
        """New tokens and their log probabilities for each row, at least one."""
        group = flight.group
        chosen = flight.landing.unpack()
        pass_ns = flight.landing.there.since(flight.begin)
        for row, decoding in zip(group, flight.decoding, strict=True):
            if decoding:
                row.decode_ns += pass_ns
            else:
                row.prefill_ns += pass_ns
            if row.encoding is not None:
                began, ended = row.encoding
                row.encode_ns, row.encoding = ended.since(began), None
        results: list[Chosen] = []
        at = 0
        for row in group:
            count = 1 + len(row.draft)
            mine = chosen.part(at, at + count) if self.script is None else self.script(row, count)
            agreed = _agreement(row.draft, mine.ids)
            results.append(mine.part(0, agreed + 1))
            row.kv = row.known_length + agreed
            row.draft = ()
            at += count
        return results

    def has_room(self, row: Qwen3Sequence) -> bool:
        """Whether the slot has a position for the token after the next."""
        return row.kv + 1 < self._decoder.scratch

    def listen(self, rows: Sequence[Qwen3Sequence]) -> None:
        """Encode the sound of ``rows`` that has no final embedding yet: windows that closed, and the open one."""
        began = Mark(self._decoder.device)
        lengths = [row.samples.length for row in rows]
        spans = [(row.first_open_frame(), geometry.frames_of(n)) for row, n in zip(rows, lengths, strict=True)]
        clips = [row.samples.for_frames(*span) for row, span in zip(rows, spans, strict=True)]
        counts = [last - first for first, last in spans]
        mel = self._mel(clips, counts, [row.loudest for row in rows])
        per_clip = mel.features.shape[-1] // geometry.WINDOW_FRAMES
        windows = mel.features.reshape(len(rows), geometry.MELS, per_clip, geometry.WINDOW_FRAMES)
        windows = windows.transpose(1, 2).flatten(0, 1)
        picked, frames = _windows(counts, per_clip)
        index = torch.tensor(picked, dtype=torch.long).to(windows.device, non_blocking=True)
        embeddings = iter(self._encoder(windows[index], frames))
        for n, row in enumerate(rows):
            row.windows_encoded += -(-counts[n] // geometry.WINDOW_FRAMES)
            parts = [next(embeddings) for _ in range(-(-counts[n] // geometry.WINDOW_FRAMES))]
            closed = geometry.closed_windows(lengths[n], finished=row.finished) - len(row.windows)
            # What stays is copied, or it would keep the embeddings of the whole group.
            kept = [part.clone() for part in parts[:closed]]
            row.hear(kept, parts[closed] if len(parts) > closed else None, mel.loudest[n], length=lengths[n])
        ended = Mark(self._decoder.device)
        for row in rows:
            row.encoding = began, ended

    def _fill(self, group: Sequence[Qwen3Sequence], ids: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> Tensor:
        """Hidden states ``(n, hidden)`` of all missing positions, row after row; the slots hold them afterwards."""
        device = self._decoder.device
        line = upload(np.concatenate(ids).astype(np.int64), device)
        embeddings = self._decoder.embed(line)
        places, parts, first = [], [], 0
        for row, piece in zip(group, pieces, strict=True):
            for place, part in _sound(row):
                places.append(np.arange(first + place, first + place + part.shape[0]))
                parts.append(part.to(device))
            first += piece.count
        if parts:
            embeddings.index_copy_(0, upload(np.concatenate(places), device), torch.cat(parts))
        return self._forward.hidden(line, embeddings, pieces)

    def _choose(
        self, hidden: Tensor, group: Sequence[Qwen3Sequence], pieces: Sequence[Piece], chooser: Chooser
    ) -> Tensor:
        """Packed tokens, judged: of each row those that follow its draft's tokens, and what stands before them."""
        counts = np.array([1 + len(row.draft) for row in group])
        owners = np.repeat(np.arange(len(group)), counts)
        from_last = np.arange(len(owners)) + 1 - np.cumsum(counts)[owners]
        places = np.cumsum([piece.count for piece in pieces])[owners] - 1 + from_last
        spots = spots_of(pieces)[:, owners]
        spots[2] += from_last
        there = upload(np.concatenate([spots, places[None]]), hidden.device)
        wanted = hidden[there[3]]
        packed = []
        for at in range(0, len(owners), _LOGITS_AT_ONCE):
            part = slice(at, at + _LOGITS_AT_ONCE)
            choose = chooser([group[n] for n in owners[part]]) or greedy
            packed.append(choose(self._decoder.logits(wanted[part])))
        return self._forward.verdicts.judge(torch.cat(packed, dim=1), there[:3])


def seat(row: Qwen3Sequence) -> int:
    """The slot of a row that has one."""
    if row.slot is None:
        raise RuntimeError("a row without a slot cannot be computed")
    return row.slot


def _windows(counts: list[int], per_clip: int) -> tuple[list[int], list[int]]:
    """Places of real windows among ``per_clip`` a clip, and their frames."""
    picked, frames = [], []
    for clip, count in enumerate(counts):
        for window in range(-(-count // geometry.WINDOW_FRAMES)):
            picked.append(clip * per_clip + window)
            frames.append(min(geometry.WINDOW_FRAMES, count - window * geometry.WINDOW_FRAMES))
    return picked, frames


def _sound(row: Qwen3Sequence) -> Iterator[tuple[int, Tensor]]:
    """The sound that is missing in the row's slot, and where it stands, counted from position ``row.kv``."""
    at = len(row.head) - row.kv
    if at + row.audio_length <= 0:  # a row that decodes: all of it is there
        return
    for part in [*row.windows, *([] if row.open_window is None else [row.open_window])]:
        if at >= 0:
            yield at, part
        elif at + part.shape[0] > 0:
            yield 0, part[-at:]
        at += part.shape[0]


def _revisions(group: Sequence[Qwen3Sequence]) -> list[int]:
    return [row.revision for row in group]


def _agreement(draft: tuple[int, ...], chosen: list[int]) -> int:
    """Leading tokens of the draft that the model would have chosen itself."""
    for n, token in enumerate(draft):
        if chosen[n] != token:
            return n
    return len(draft)
