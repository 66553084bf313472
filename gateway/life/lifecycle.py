"""The worker's life as a pure function: ``step(state, event) -> (state, effects)``. No clock, no process, no socket.

::

    stopped -> starting -> ready -> draining -> stopping -> stopped
    an unexpected exit -> cooldown(n) -> starting, if anybody waits
    anything -> closed

Rules that the table keeps:

- Leases keep a worker alive. The idle timer is armed at ``ready`` and at the last release, here, by the one writer; so
  no request can slip between a look at the clock and the stop that follows.
- An acquire in ``draining`` takes the worker back; in ``stopping`` it waits for the exit and starts the next one.
- The stall deadline of a start moves with every sign of progress: a slow disk is not a hang, and a hang is not patience.
- Every exit is reaped before the next spawn: there are never two workers.
- An event of an earlier generation changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple


class Phase(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    COOLDOWN = "cooldown"
    CLOSED = "closed"


class Timer(enum.Enum):
    IDLE = "idle"
    STALL = "stall"
    KILL = "kill"
    """The next, harder way to end the process."""
    COOLDOWN = "cooldown"


@dataclass(frozen=True)
class Policy:
    """Durations in seconds."""

    idle_s: float
    start_stall_s: float
    stop_s: float = 5.0
    """Grace between the stop command, SIGTERM and SIGKILL."""
    cooldown_s: float = 0.5
    """After the first failure in a row; doubles with each further one."""
    cooldown_max_s: float = 30.0
    start_attempts: int = 3
    """Failed starts in a row after which the callers who wait are told."""


@dataclass(frozen=True)
class State:
    phase: Phase = Phase.STOPPED
    generation: int = 0
    leases: int = 0
    failures: int = 0
    """Unexpected exits in a row; back to 0 when a worker proves itself (``Settled``)."""
    failed_starts: int = 0
    """Exits before ready, in a row."""
    process: bool = False
    """Spawned and not yet reaped."""
    proved: bool = False
    """This generation was ready once."""
    asked: bool = False
    """We want the process to end; its exit is no crash."""
    hardness: int = 0
    """How far ending the process has gone: 0 command, 1 SIGTERM, 2 SIGKILL."""
    reason: str = ""
    """Why the process is being ended or has ended, for people."""


# ---------------------------------------------------------------- events


class Acquire(NamedTuple):
    """One more lease."""


class Release(NamedTuple):
    """One lease less."""


class Unload(NamedTuple):
    """Leave when the last lease ends; ``force`` ends the process now."""

    force: bool = False


class Close(NamedTuple):
    """The gateway itself ends."""


class Progressed(NamedTuple):
    generation: int


class BecameReady(NamedTuple):
    generation: int


class Settled(NamedTuple):
    """The worker finished a job: earlier failures are forgotten."""

    generation: int


class Exited(NamedTuple):
    generation: int
    reason: str
    retry: bool = True
    """False if a new start cannot help (a model that does not exist)."""


class Unresponsive(NamedTuple):
    generation: int
    reason: str


class Fired(NamedTuple):
    timer: Timer


Event = Acquire | Release | Unload | Close | Progressed | BecameReady | Settled | Exited | Unresponsive | Fired

# ---------------------------------------------------------------- effects


class Spawn(NamedTuple):
    generation: int


class End(NamedTuple):
    """End the process of this generation. Hardness 0: stop command, 1: SIGTERM to its group, 2: SIGKILL to its group."""

    generation: int
    hardness: int


class Arm(NamedTuple):
    timer: Timer
    seconds: float


class Disarm(NamedTuple):
    timer: Timer


class AnnounceReady(NamedTuple):
    generation: int


class AnnounceStopping(NamedTuple):
    """Nothing more is to be given to this worker."""

    generation: int


class AnnounceLost(NamedTuple):
    """The worker is gone. ``crashed``: it was not asked to go."""

    generation: int
    crashed: bool
    reason: str


class RefuseWaiters(NamedTuple):
    """Tell everybody who waits for a worker that none will come soon."""

    reason: str
    retry: bool


class Reclaim(NamedTuple):
    """A good moment to give memory back."""


Effect = Spawn | End | Arm | Disarm | AnnounceReady | AnnounceStopping | AnnounceLost | RefuseWaiters | Reclaim
Step = tuple[State, list[Effect]]

_HARDEST = 2


def step(state: State, event: Event, policy: Policy) -> Step:
    """The next state and what is to be done, in order."""
    if state.phase is Phase.CLOSED and not isinstance(event, Exited | Fired):
        return _closed(state, event)
    match event:
        case Acquire():
            return _demand(replace(state, leases=state.leases + 1), policy)
        case Release():
            return _release(state, policy)
        case Unload(force):
            return _unload(state, force, policy)
        case Close():
            return _close(state, policy)
        case Fired(timer):
            return _fired(state, timer, policy)
        case Progressed(generation) | BecameReady(generation) | Settled(generation):
            return _sign_of_life(state, event, policy) if generation == state.generation else (state, [])
        case Unresponsive(generation, reason):
            if generation != state.generation or state.phase not in {Phase.STARTING, Phase.READY, Phase.DRAINING}:
                return state, []
            return _end(replace(state, reason=reason), _HARDEST, policy)
        case Exited(generation, reason, retry):
            return _exited(state, reason, retry, policy) if generation == state.generation else (state, [])


def _demand(state: State, policy: Policy) -> Step:
    match state.phase:
        case Phase.STOPPED:
            return _start(state, policy)
        case Phase.READY:
            return state, [Disarm(Timer.IDLE)] if state.leases else [Arm(Timer.IDLE, policy.idle_s)]
        case Phase.DRAINING:
            return replace(state, phase=Phase.READY), [Disarm(Timer.IDLE)]
        case _:
            return state, []


def _start(state: State, policy: Policy) -> Step:
    generation = state.generation + 1
    started = replace(
        state,
        phase=Phase.STARTING,
        generation=generation,
        hardness=0,
        process=True,
        proved=False,
        asked=False,
        reason="",
    )
    return started, [Spawn(generation), Arm(Timer.STALL, policy.start_stall_s)]


def _release(state: State, policy: Policy) -> Step:
    state = replace(state, leases=max(0, state.leases - 1))
    if state.leases:
        return state, []
    if state.phase is Phase.READY:
        return state, [Arm(Timer.IDLE, policy.idle_s)]
    if state.phase is Phase.DRAINING:
        return _end(replace(state, reason="unloaded", asked=True), 0, policy)
    return state, []


def _unload(state: State, force: bool, policy: Policy) -> Step:
    match state.phase:
        case Phase.STARTING | Phase.READY | Phase.DRAINING if force:
            ended, effects = _end(replace(state, reason="unloaded by force", asked=True), _HARDEST, policy)
            return ended, [RefuseWaiters("The worker was unloaded by force.", retry=True), *effects]
        case Phase.STOPPING if force and state.hardness < _HARDEST:
            return _end(state, _HARDEST, policy)
        case Phase.READY if state.leases:
            return replace(state, phase=Phase.DRAINING), [Disarm(Timer.IDLE)]
        case Phase.STARTING if state.leases:
            return state, []
        case Phase.READY | Phase.STARTING:
            return _end(replace(state, reason="unloaded", asked=True), 0, policy)
        case Phase.COOLDOWN if not state.leases:
            return replace(state, phase=Phase.STOPPED, failures=0), [Disarm(Timer.COOLDOWN)]
        case _:
            return state, []


def _close(state: State, policy: Policy) -> Step:
    effects: list[Effect] = [Disarm(Timer.IDLE), Disarm(Timer.STALL), Disarm(Timer.COOLDOWN)]
    if state.process:
        effects += [End(state.generation, state.hardness), Arm(Timer.KILL, policy.stop_s)]
    else:
        effects += [Disarm(Timer.KILL)]
    effects.append(RefuseWaiters("The server is shutting down.", retry=True))
    return replace(state, phase=Phase.CLOSED, asked=True, reason="closed"), effects


def _closed(state: State, event: Event) -> Step:
    match event:
        case Acquire():
            refusal = RefuseWaiters("The server is shutting down.", retry=True)
            return replace(state, leases=state.leases + 1), [refusal]
        case Release():
            return replace(state, leases=max(0, state.leases - 1)), []
        case _:
            return state, []


def _end(state: State, hardness: int, policy: Policy) -> Step:
    effects: list[Effect] = [
        Disarm(Timer.IDLE),
        Disarm(Timer.STALL),
        AnnounceStopping(state.generation),
        End(state.generation, hardness),
        Arm(Timer.KILL, policy.stop_s),
    ]
    return replace(state, phase=Phase.STOPPING, hardness=hardness), effects


def _fired(state: State, timer: Timer, policy: Policy) -> Step:
    match timer, state.phase:
        case Timer.IDLE, Phase.READY if not state.leases:
            return _end(replace(state, reason="idle", asked=True), 0, policy)
        case Timer.STALL, Phase.STARTING:
            reason = f"no progress for {policy.start_stall_s:g} s while starting"
            return _end(replace(state, reason=reason), _HARDEST, policy)
        case Timer.KILL, Phase.STOPPING | Phase.CLOSED if state.process:
            hardness = min(state.hardness + 1, _HARDEST)
            return replace(state, hardness=hardness), [End(state.generation, hardness), Arm(Timer.KILL, policy.stop_s)]
        case Timer.COOLDOWN, Phase.COOLDOWN:
            if state.leases:
                return _start(state, policy)
            return replace(state, phase=Phase.STOPPED), []
        case _:
            return state, []


def _sign_of_life(state: State, event: Progressed | BecameReady | Settled, policy: Policy) -> Step:
    match event, state.phase:
        case Progressed(), Phase.STARTING:
            return state, [Arm(Timer.STALL, policy.start_stall_s)]
        case BecameReady(), Phase.STARTING:
            idle: list[Effect] = [] if state.leases else [Arm(Timer.IDLE, policy.idle_s)]
            ready = replace(state, phase=Phase.READY, failed_starts=0, proved=True)
            return ready, [Disarm(Timer.STALL), AnnounceReady(state.generation), *idle]
        case Settled(), Phase.READY | Phase.DRAINING:
            return replace(state, failures=0), []
        case _:
            return state, []


def _exited(state: State, reason: str, retry: bool, policy: Policy) -> Step:
    """The process is reaped. Whether that was a crash depends on whether we had asked for it."""
    if not state.process:
        return state, []
    state = replace(state, process=False)
    quiet: list[Effect] = [Disarm(Timer.IDLE), Disarm(Timer.STALL), Disarm(Timer.KILL)]
    if state.phase is Phase.CLOSED:
        return state, [*quiet, AnnounceLost(state.generation, crashed=False, reason="closed")]
    if state.phase is Phase.STOPPING and state.asked:
        lost = AnnounceLost(state.generation, crashed=False, reason=state.reason)
        stopped, more = _resume(replace(state, phase=Phase.STOPPED), policy)
        return stopped, [*quiet, lost, *more]
    crashed, more = _crashed(state, state.reason or reason, retry, policy)
    return crashed, [*quiet, *more]


def _crashed(state: State, why: str, retry: bool, policy: Policy) -> Step:
    failures = state.failures + 1
    failed_starts = 0 if state.proved else state.failed_starts + 1
    state = replace(state, failures=failures, failed_starts=failed_starts, reason=why, phase=Phase.COOLDOWN)
    effects: list[Effect] = [AnnounceLost(state.generation, crashed=True, reason=why)]
    if not retry or failed_starts >= policy.start_attempts:
        state = replace(state, failed_starts=0)
        effects.append(RefuseWaiters(why, retry))
    if state.proved and failures == 1:
        resumed, more = _resume(replace(state, phase=Phase.STOPPED), policy)
        return resumed, [*effects, *more]
    return state, [*effects, Arm(Timer.COOLDOWN, cooldown(failures, policy)), Reclaim()]


def _resume(state: State, policy: Policy) -> Step:
    """From ``stopped``: start again for whoever has come meanwhile, or rest."""
    return _start(state, policy) if state.leases else (state, [Reclaim()])


def cooldown(failures: int, policy: Policy) -> float:
    """Seconds of rest after so many failures in a row: exponential, capped."""
    return min(policy.cooldown_s * 2.0 ** min(failures - 1, 30), policy.cooldown_max_s)
