"""The single writer of the worker's life: turns ``lifecycle``'s effects into processes, timers and messages.

Nobody else reads a state and acts on it. A door takes a ``Lease``; what needs a running worker says ``ensure_ready()``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.life import lifecycle
from gateway.life.channel import Channel
from gateway.life.lifecycle import Phase, Policy, State, Timer
from gateway.life.process import WorkerProcess, resident_bytes
from gateway.life.vitals import Vitals, Worker
from shared.errors import NapscribeError, ProtocolError, WorkerUnavailable, from_code
from shared.journal import log
from shared.messages import Event, Ping, Stop
from shared.recorder import Recorder

PULSE_SECONDS = 1.0
MISSED_PULSES = 5
"""Pings in a row without an answer after which a ready worker counts as hung. Ticks are counted, not seconds: a gateway
that was itself suspended does not blame the worker."""


class Listener(Protocol):
    """Who has work for the worker."""

    def worker_ready(self, worker: Worker) -> None: ...

    def worker_stopping(self) -> None:
        """Give it nothing more; ``worker_lost`` follows."""
        ...

    def worker_lost(self, generation: int, *, crashed: bool, reason: str) -> None: ...

    def refuse_all(self, error: NapscribeError) -> None:
        """No worker will come soon: tell everybody who waits."""
        ...


class Lease:
    """Keeps the worker alive (and wakes it) until released. Releasing twice is one release."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor: Supervisor | None = supervisor

    def release(self) -> None:
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            supervisor.post(lifecycle.Release())

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Supervisor:
    """Runs on the gateway's loop; every public method returns at once unless it says it waits."""

    def __init__(
        self,
        policy: Policy,
        channel: Channel,
        command: Callable[[int, int], Sequence[str]],
        listeners: Sequence[Listener],
        reclaim: Callable[[], None],
        languages: tuple[str, ...] = (),
    ) -> None:
        """``languages``: what is known of the model's before its first start."""
        self._policy = policy
        self._channel = channel
        self._command = command
        self._listeners = listeners
        self._reclaim = reclaim
        self._loop = asyncio.get_running_loop()
        self._state = State()
        self._inbox: collections.deque[lifecycle.Event] = collections.deque()
        self._stepping = False
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: WorkerProcess | None = None
        self._recorder: tuple[int, Recorder | None] = (0, None)
        self._vitals = Vitals(languages)
        self._waiters: list[asyncio.Future[Worker]] = []
        self._changed = asyncio.Event()
        self._pulse: asyncio.TimerHandle | None = None
        self._started_at = 0.0
        self.spawn_seconds = 0.0
        """Spawn to ready of the last start."""

    # ------------------------------------------------------------ for everybody

    def lease(self) -> Lease:
        """One more reason for a worker to be there; starts one if none is."""
        lease = Lease(self)
        self.post(lifecycle.Acquire())
        return lease

    async def ensure_ready(self) -> Worker:
        """Wait for a ready worker; the caller holds a lease. Raises what ``Listener.refuse_all`` is told."""
        if self._vitals.worker is not None and self._state.phase is Phase.READY:
            return self._vitals.worker
        waiter: asyncio.Future[Worker] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def load(self) -> Worker:
        """Start the worker without a job and wait until it is ready."""
        with self.lease():
            return await self.ensure_ready()

    async def unload(self, *, force: bool) -> bool:
        """Leave after the jobs in hand (``force``: now). Waits; False if a new job kept the worker.

        Whoever waits may start another worker at once; a forced unload is done when the one it was meant for is gone.
        """
        generation = self._state.generation
        self.post(lifecycle.Unload(force))
        while self._state.phase not in {Phase.STOPPED, Phase.COOLDOWN, Phase.CLOSED}:
            if force and self._state.generation != generation:
                return True
            if not force and self._state.phase in {Phase.READY, Phase.STARTING}:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def aclose(self) -> None:
        """End the worker and wait until it is reaped."""
        self.post(lifecycle.Close())
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._pulse is not None:
            self._pulse.cancel()

    @property
    def phase(self) -> Phase:
        """For reports only: whoever acts on it races with the writer."""
        return self._state.phase

    def report(self) -> dict[str, object]:
        """The state of the worker for people and monitors; wakes nothing."""
        process, state, worker = self._process, self._state, self._vitals.worker
        phase, fraction = self._vitals.start
        pid = process.pid if process else worker.pid if worker else 0
        return {
            "state": state.phase.value,
            "generation": state.generation,
            "pid": pid or None,
            "reason": state.reason or None,
            "starting": {"phase": phase, "fraction": fraction} if state.phase is Phase.STARTING else None,
            "leases": state.leases,
            "idle_in_seconds": self._seconds_left(Timer.IDLE),
            "cooldown_seconds": self._seconds_left(Timer.COOLDOWN),
            "resident_bytes": resident_bytes(pid) if pid else 0,
            **self._vitals.report(),
        }

    @property
    def word_times(self) -> str:
        """``exact``, ``estimated`` or ``none``, as the last engine declared it."""
        return self._vitals.word_times

    @property
    def languages(self) -> tuple[str, ...]:
        """ISO 639-1 codes, as the last engine declared them; before there was one, what its name tells."""
        return self._vitals.languages

    def starting(self) -> str:
        """One phrase about where a start is, for people who wait."""
        phase, fraction = self._vitals.start
        if self._state.phase is not Phase.STARTING:
            return str(self._state.phase.value)
        return f"starting: {phase or 'spawned'}" + (f" {fraction:.0%}" if fraction else "")

    def suspects(self, generation: int) -> dict[str, int]:
        """Requests that a dead worker was working on at its end, with the segment in hand."""
        known, recorder = self._recorder
        return recorder.read() if recorder is not None and known == generation else {}

    def settled(self, generation: int) -> None:
        """The worker has finished something: earlier crashes are forgotten."""
        self.post(lifecycle.Settled(generation))

    def unresponsive(self, generation: int, reason: str) -> None:
        """Somebody has proof that this worker is of no use any more."""
        self.post(lifecycle.Unresponsive(generation, reason))

    # ------------------------------------------------------------ what the worker says

    def handle(self, event: Event) -> None:
        """Events about the worker itself; the caller routes those of jobs elsewhere."""
        if event.generation != self._state.generation:
            return
        meaning = self._vitals.take(event)
        if meaning is not None:
            self.post(meaning)

    def garbage(self, generation: int, error: ProtocolError) -> None:
        """A worker that speaks nonsense is as good as a dead one; a stranger's nonsense is dropped."""
        log("garbage on the channel", level="error", about=generation, error=str(error))
        if generation == self._state.generation:
            self.unresponsive(generation, f"it sent garbage: {error.message}")

    # ------------------------------------------------------------ the writer

    def post(self, event: lifecycle.Event) -> None:
        """Hand an event to the writer. An effect may post in turn; events are stepped one after the other."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                before = self._state.phase
                self._state, effects = lifecycle.step(self._state, self._inbox.popleft(), self._policy)
                if self._state.phase is not before:
                    self._phase_changed()
                for effect in effects:
                    self._perform(effect)
        finally:
            self._stepping = False
        self._changed.set()

    def _phase_changed(self) -> None:
        log("worker", state=self._state.phase.value, about=self._state.generation, reason=self._state.reason or None)

    def _perform(self, effect: lifecycle.Effect) -> None:
        match effect:
            case lifecycle.Spawn(generation):
                self._keep(self._run(generation))
            case lifecycle.End(generation, hardness):
                self._end(generation, hardness)
            case lifecycle.Arm(timer, seconds):
                self._disarm(timer)
                self._timers[timer] = self._loop.call_later(seconds, self._fire, timer)
            case lifecycle.Disarm(timer):
                self._disarm(timer)
            case lifecycle.AnnounceReady():
                self._announce_ready()
            case lifecycle.AnnounceStopping():
                for listener in self._listeners:
                    listener.worker_stopping()
            case lifecycle.AnnounceLost(generation, crashed, reason):
                self._vitals.worker = None
                self._channel.forget(generation)
                for listener in self._listeners:
                    listener.worker_lost(generation, crashed=crashed, reason=reason)
            case lifecycle.RefuseWaiters(reason, retry):
                self._refuse(reason, retry)
            case lifecycle.Reclaim():
                self._reclaim()

    def _announce_ready(self) -> None:
        worker = self._vitals.worker
        assert worker is not None
        self.spawn_seconds = self._loop.time() - self._started_at
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(worker)
        self._vitals.missed = 0
        self._pulse = self._loop.call_later(PULSE_SECONDS, self._beat, worker.generation)
        for listener in self._listeners:
            listener.worker_ready(worker)

    def _refuse(self, reason: str, retry: bool) -> None:
        error: NapscribeError
        fatal = self._vitals.fatal
        if fatal is not None and not retry:
            error = from_code(fatal.code, fatal.message, hint=fatal.hint)
        else:
            hint = "The server's log has the worker's last words."
            error = WorkerUnavailable(f"No worker: {reason.rstrip('.')}.", hint=hint, retry_after=1)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        for listener in self._listeners:
            listener.refuse_all(error)

    def _fire(self, timer: Timer) -> None:
        self._timers.pop(timer, None)
        self.post(lifecycle.Fired(timer))

    def _disarm(self, timer: Timer) -> None:
        handle = self._timers.pop(timer, None)
        if handle is not None:
            handle.cancel()

    def _seconds_left(self, timer: Timer) -> float | None:
        handle = self._timers.get(timer)
        return None if handle is None else round(max(0.0, handle.when() - self._loop.time()), 3)

    # ------------------------------------------------------------ the process

    def _keep(self, work: collections.abc.Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, generation: int) -> None:
        """From spawn to reaped, whatever happens in between."""
        self._started_at = self._loop.time()
        self._vitals.begin(generation)
        try:
            process = await self._spawn(generation)
        except Exception as error:
            # No descriptors, no threads, no memory: whatever it is, nobody must wait for this worker.
            self.post(lifecycle.Exited(generation, f"it cannot be started: {error}", retry=False))
            return
        self._process = process
        if self._state.phase in {Phase.STOPPING, Phase.CLOSED}:
            self._end(generation, max(1, self._state.hardness))
        how = await process.wait()
        self._process = None
        fatal = self._vitals.fatal
        if fatal is None and self._state.phase is not Phase.CLOSED and not self._state.asked:
            log("worker's last words", level="error", about=generation, exit=how, stderr=list(process.tail)[-12:])
        reason = fatal.message if fatal else f"the worker ended: {how}"
        self.post(lifecycle.Exited(generation, reason, retry=fatal is None or fatal.retry))
        self._recorder = (0, None)

    async def _spawn(self, generation: int) -> WorkerProcess:
        descriptor = Recorder.create()
        try:
            self._recorder = (generation, Recorder(descriptor))
            argv = self._command(generation, descriptor)
            return await WorkerProcess.spawn(argv, {**os.environ, "PYTHONSAFEPATH": "1"}, [descriptor])
        finally:
            os.close(descriptor)

    def _end(self, generation: int, hardness: int) -> None:
        process = self._process
        if process is None or generation != self._state.generation:
            return
        if hardness == 0:
            try:
                self._channel.control(Stop(generation))
            except NapscribeError:
                hardness = 1
        if hardness == 1:
            process.signal(signal.SIGTERM)
        elif hardness > 1:
            process.signal(signal.SIGKILL)

    def _beat(self, generation: int) -> None:
        worker, vitals = self._vitals.worker, self._vitals
        if worker is None or worker.generation != generation or self._state.phase is Phase.STOPPING:
            return
        if vitals.missed >= MISSED_PULSES:
            self.unresponsive(generation, f"no answer to {vitals.missed} pings")
            return
        vitals.missed += 1
        with contextlib.suppress(NapscribeError):
            self._channel.control(Ping(generation, vitals.missed))
        self._pulse = self._loop.call_later(PULSE_SECONDS, self._beat, generation)
