"""Who sits in which key/value slot. The lowest free slot is taken, so that a batch is as short as it can be."""

from __future__ import annotations

import heapq

from shared.messages import Lane
from worker.engines.qwen3.sequence import Qwen3Sequence


class SlotTable:
    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._seated: dict[int, Qwen3Sequence] = {}
        self._arrivals = 0
        self.evictions = 0
        self.calls = 0
        """Sequences of calls that have a slot."""

    def __len__(self) -> int:
        return len(self._seated)

    def seat(self, sequence: Qwen3Sequence) -> bool:
        """Give it a slot if there is one. Live work takes the youngest batch sequence's, which is computed again later."""
        if sequence.slot is not None:
            return True
        if not self._free and sequence.lane is Lane.LIVE:
            self._evict_one()
        if not self._free:
            return False
        slot = heapq.heappop(self._free)
        self._arrivals += 1
        sequence.slot, sequence.kv, sequence.arrival = slot, 0, self._arrivals
        self._seated[slot] = sequence
        self.calls += sequence.lane is Lane.LIVE
        return True

    def release(self, sequence: Qwen3Sequence) -> None:
        """Take the slot back; does nothing for a sequence without one."""
        if sequence.slot is None:
            return
        del self._seated[sequence.slot]
        self.calls -= sequence.lane is Lane.LIVE
        heapq.heappush(self._free, sequence.slot)
        sequence.leave_slot()

    def _evict_one(self) -> None:
        """The lowest lane loses first, and in it the youngest: it has the least to compute again."""
        candidates = [s for s in self._seated.values() if s.lane is not Lane.LIVE]
        if candidates:
            self.release(max(candidates, key=lambda s: (s.lane, s.arrival)))
            self.evictions += 1
