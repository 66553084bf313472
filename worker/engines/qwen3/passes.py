"""The passes of one step: launched one after the other before the first is waited for.

While the device computes a pass, the host prepares the next one and then works on the tokens of the one before: with
hundreds of rows, that work takes about as long as the passes do. Where all there is to do is the next token of files' rows, the
pass after this one is launched *ahead*, too, before anybody on the host knows the tokens that it goes on from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shared.errors import EngineFailed, NapscribeError, OutOfMemory
from shared.journal import log
from shared.messages import Lane
from worker.engines.base import EngineEvent
from worker.engines.qwen3 import device as devices
from worker.engines.qwen3.catch_up import CatchUp, Chooser, Flight, Results
from worker.engines.qwen3.device import Device
from worker.engines.qwen3.sequence import Qwen3Sequence

_ROWS_IN_HALVES = {"cuda": 32}
"""A group of so many rows that catch up is computed in two passes, so that the host works on one while the device computes the other. Less
would cost the device more than the host gains; where host and device are the same cores, nothing is gained."""

Advance = Callable[[Sequence[Qwen3Sequence], Results], list[EngineEvent]]
Fail = Callable[[Qwen3Sequence, NapscribeError], EngineEvent]


class Passes:
    """Runs them; what becomes of the tokens is told to ``advance``, and which row cannot go on to ``fail``."""

    def __init__(self, device: Device, catch_up: CatchUp, chooser: Chooser, advance: Advance, fail: Fail) -> None:
        self._catch_up = catch_up
        self._chooser = chooser
        self._advance = advance
        self._fail = fail
        self._device = device
        self.rows_in_halves = _ROWS_IN_HALVES.get(device.where.type, 0)
        """0: groups are never halved."""
        self.goes_ahead = device.cuda
        """Where host and device are the same cores, nothing is gained."""
        self._ahead: Flight | None = None

    def run(
        self, group: Sequence[Qwen3Sequence], riders: Sequence[Qwen3Sequence], current: Sequence[Qwen3Sequence]
    ) -> list[EngineEvent]:
        """One pass or two for ``group``, with ``riders`` in the first; both may be empty, and no row is in both.

        ``current``: all rows of this step that lack only their next token, riders among them. Those that a pass launched
        ahead has computed get it from there.
        """
        ahead, self._ahead = self._ahead, None
        known = {id(row) for n, row in enumerate(ahead.group) if ahead.holds(n)} if ahead else set()
        riders = [row for row in riders if id(row) not in known]
        if not group and self._may_go_ahead(current):
            return self._run_ahead(ahead, riders, current)
        events: list[EngineEvent] = []
        flights = []
        for piece in self._pieces(group, riders):
            try:
                flights.append(self._catch_up.launch(piece, self._chooser))
            except (RuntimeError, NapscribeError) as error:
                events += self._again(piece, error)
        if ahead:
            events += self._advance(*self._catch_up.land_ahead(ahead, current))
        for flight in flights:
            events += self._advance(flight.group, self._catch_up.land(flight))
        return events

    def _may_go_ahead(self, current: Sequence[Qwen3Sequence]) -> bool:
        """Calls get their tokens in the step in which they ask for them; and a chooser wants to see the rows as they are."""
        apart = any(row.lane is Lane.LIVE or row.request.temperature for row in current)
        return self.goes_ahead and not apart and self._chooser(current) is None

    def _run_ahead(
        self, flight: Flight | None, riders: Sequence[Qwen3Sequence], current: Sequence[Qwen3Sequence]
    ) -> list[EngineEvent]:
        if flight is None or not any(map(flight.holds, range(len(flight.group)))):
            try:
                flight, riders = self._catch_up.launch(riders, self._chooser), ()
            except (RuntimeError, NapscribeError) as error:
                return self._again(riders, error)
        going = [row for n, row in enumerate(flight.group) if flight.holds(n) and self._catch_up.has_room(row)]
        if following := [*going, *riders]:
            try:
                self._ahead = self._catch_up.launch_ahead(following, flight)
            except RuntimeError as error:  # they get their tokens in the next step
                self._survive(error)
        return self._advance(*self._catch_up.land_ahead(flight, current))

    def listen(self, group: Sequence[Qwen3Sequence]) -> list[EngineEvent]:
        """Only encode the sound of ``group``: half of catching up, where a whole pass would keep calls waiting."""
        try:
            self._catch_up.listen([row for row in group if row.audio_due])
        except (RuntimeError, NapscribeError) as error:
            return self._again(group, error)
        return []

    def _pieces(self, group: Sequence[Qwen3Sequence], riders: Sequence[Qwen3Sequence]) -> list[list[Qwen3Sequence]]:
        if not group and not riders:
            return []
        if self.rows_in_halves and len(group) >= self.rows_in_halves:
            half = math.ceil(len(group) / 2)
            return [[*group[:half], *riders], [*group[half:]]]
        return [[*group, *riders]]

    # ------------------------------------------------------------ when a pass fails

    def _survive(self, error: BaseException) -> None:
        """Free what can be freed, if memory was short. Raises EngineBroken if there is nothing to go on with."""
        if isinstance(error, torch.OutOfMemoryError):
            devices.release_cached(self._device)
            return
        devices.require_alive(self._device, error)
        log("a pass failed", level="error", error=repr(error))

    def _again(self, group: Sequence[Qwen3Sequence], error: BaseException) -> list[EngineEvent]:
        if not isinstance(error, NapscribeError):
            self._survive(error)
        if isinstance(error, torch.OutOfMemoryError):
            return self._retry_smaller(group, error)
        if len(group) == 1:
            return [self._fail(group[0], _typed(error))]
        return [event for row in group for event in self._alone(row)]

    def _alone(self, row: Qwen3Sequence) -> list[EngineEvent]:
        try:
            return self._advance([row], self._catch_up.run([row], self._chooser))
        except (RuntimeError, NapscribeError) as error:
            return self._again([row], error)

    def _retry_smaller(self, group: Sequence[Qwen3Sequence], error: BaseException) -> list[EngineEvent]:
        """Now that memory has been freed, with half of the rows, or the only one, and with half of those again; the others come in
        later steps. What does not fit alone fails alone."""
        smaller = group[: math.ceil(len(group) / 2)]
        try:
            return self._advance(smaller, self._catch_up.run(smaller, self._chooser))
        except torch.OutOfMemoryError as again:
            self._survive(again)
            error = again
        except (RuntimeError, NapscribeError) as other:
            return self._again(smaller, other)
        if len(smaller) > 1:
            return self._retry_smaller(smaller, error)
        failure = OutOfMemory(
            "The device ran out of memory for this recording.",
            hint=devices.MORE_MEMORY,
        )
        failure.__cause__ = error
        return [self._fail(smaller[0], failure)]


def _typed(error: BaseException) -> NapscribeError:
    return error if isinstance(error, NapscribeError) else EngineFailed(f"The engine failed: {type(error).__name__}.")
