"""What a worker says of itself, from its first word to its last, and what of that means that it is of no use any more."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.life import lifecycle
from shared.errors import ModelLoadFailed
from shared.messages import PROTOCOL_VERSION, Capabilities, Event, Fatal, Hello, Lane, Pong, Progress, Ready

MAX_AUDIO_STEP_SECONDS = 60
"""A stretch of a file is decoded and listened to in less than a second, and a child that reads it may have to start: 20 s at most."""


@dataclass(frozen=True)
class Worker:
    """A worker that is ready."""

    generation: int
    pid: int
    capabilities: Capabilities
    credits: dict[Lane, int]


class Vitals:
    """Of the generation that was begun last; the supervisor alone changes them."""

    def __init__(self, languages: tuple[str, ...] = ()) -> None:
        """``languages``: what is known of the model's before its first start."""
        self.languages = languages
        """ISO 639-1 codes, as the last engine declared them; before there was one, what its name tells."""
        self.word_times = "none"
        """``exact``, ``estimated`` or ``none``, as the last engine declared it."""
        self.worker: Worker | None = None
        """Once it is ready, and until it is lost."""
        self.fatal: Fatal | None = None
        """Why it cannot do its work, in its own words."""
        self.pong = Pong(0, 0, 0, 0)
        self.missed = 0
        """Pings in a row that have no answer yet."""
        self.start = ("", 0.0)
        """Phase of the start, and how much of it is done."""
        self._pid = 0

    def begin(self, generation: int) -> None:
        self.start, self.fatal, self.pong = ("", 0.0), None, Pong(generation, 0, 0, 0)

    def take(self, event: Event) -> lifecycle.Event | None:
        """An event about the worker itself; returned is what it means for its life."""
        match event:
            case Hello(protocol=protocol) if protocol != PROTOCOL_VERSION:
                message = f"The worker speaks protocol {protocol}, this gateway {PROTOCOL_VERSION}."
                hint = "Gateway and worker come from different installations: install again."
                self.fatal = Fatal(event.generation, ModelLoadFailed.code, message, hint)
                return lifecycle.Unresponsive(event.generation, message)
            case Hello(pid=pid):
                self._pid = pid
                return self._progressed(event.generation, "connected", 0.0)
            case Progress(phase=phase, fraction=fraction):
                return self._progressed(event.generation, phase, fraction)
            case Ready(capabilities=capabilities, credits=credits):
                # On a busy loop this may come before the spawn has returned: its own word for its pid is all there is.
                self.worker = Worker(event.generation, self._pid, capabilities, credits)
                self.word_times, self.languages = capabilities.word_times, capabilities.languages
                return lifecycle.BecameReady(event.generation)
            case Fatal():
                self.fatal = event
            case Pong():
                self.missed, self.pong = 0, event
                return self._hung(event)
        return None

    def _progressed(self, generation: int, phase: str, fraction: float) -> lifecycle.Event:
        self.start = (phase, fraction)
        return lifecycle.Progressed(generation)

    def _hung(self, pong: Pong) -> lifecycle.Event | None:
        """It answers, and one of its other threads has not moved for too long."""
        step, audio = pong.step_age_ns / 1e9, pong.audio_age_ns / 1e9
        if self.worker is not None and step > self.worker.capabilities.max_step_s:
            return lifecycle.Unresponsive(pong.generation, f"a step of the engine has been running for {step:.0f} s")
        if audio > MAX_AUDIO_STEP_SECONDS:
            return lifecycle.Unresponsive(pong.generation, f"decoding has hung for {audio:.0f} s")
        return None

    def report(self) -> dict[str, object]:
        """What it is and does, for people and monitors."""
        able = self.worker.capabilities if self.worker else None
        pong = self.pong if self.worker else Pong(0, 0, 0, 0)
        return {
            "device_bytes": pong.device_memory,
            "engine": able and able.engine,
            "device": able and able.device,
            "slots": able and able.slots,
            "live_model": (able and able.live_model) or None,
            "live_slots": able and able.live_slots,
            "max_live": able and able.max_live,
            "working_on": {lane.name.lower(): pong.queued.get(lane, 0) for lane in Lane},
            "steps": pong.steps,
            "preemptions": pong.preemptions,
        }
