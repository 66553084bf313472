"""A live gateway on this loop with real workers, and a call that is played into it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.app import Gateway, Ground, gateway, ground
from gateway.streams.live import LiveStream
from shared.messages import RawAudio
from shared.settings import load
from shared.streams import (
    SpeechStarted,
    SpeechStopped,
    StreamEvent,
    StreamOptions,
    UtteranceDelta,
    UtteranceFinal,
)

FRAME_S = 0.02


@dataclass
class Call:
    """One call: what was sent, what came back."""

    gateway: Gateway
    stream: LiveStream
    events: list[StreamEvent] = field(default_factory=list)
    kills: int = 0
    sent_s: float = 0.0

    @property
    def finals(self) -> list[UtteranceFinal]:
        return [event for event in self.events if isinstance(event, UtteranceFinal)]

    @property
    def text(self) -> str:
        return " ".join(final.text for final in self.finals if final.text)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Asks now and then; a condition may keep count, so it is not asked again once it holds."""
        try:
            async with asyncio.timeout(30):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"not within 30 s: {what}")

    def kill_worker(self) -> bool:
        """SIGKILL; False if there is no worker now."""
        pid = self.gateway.supervisor.report()["pid"]
        if not isinstance(pid, int):
            return False
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        return True

    async def play(self, audio: bytes, *, rate: int = 16_000, pace: float = 1.0) -> None:
        """Send s16le in frames of 20 ms, ``pace`` times as fast as real time, as the runner of a socket does."""
        size = int(rate * FRAME_S) * 2
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, begin in enumerate(range(0, len(audio), size)):
            await asyncio.sleep(max(0.0, began + number * FRAME_S / pace - loop.time()))
            frame = audio[begin : begin + size]
            if not self.stream.take_at_once(frame):
                await self.stream.send(frame)
            self.sent_s += FRAME_S

    async def listen(self) -> None:
        async for event in self.stream.events():
            self.events.append(event)

    def check(self) -> None:
        """What must hold of any call, whatever was killed: nothing twice, nothing backwards, deltas before their final."""
        started = [event.utterance for event in self.events if isinstance(event, SpeechStarted)]
        stopped = [event.utterance for event in self.events if isinstance(event, SpeechStopped)]
        final = [event.utterance for event in self.finals]
        assert started == sorted(set(started)), "speech_started twice"
        assert stopped == sorted(set(stopped)), "speech_stopped twice"
        assert final == sorted(set(final)), "final twice"
        assert set(final) == set(started), "an utterance without its final"
        times = [(event.start_sample, event.end_sample) for event in self.finals]
        assert all(start < end for start, end in times)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times)), f"times go backwards: {times}"
        for number in final:
            kinds = [type(e) for e in self.events if getattr(e, "utterance", None) == number]
            assert kinds[0] is SpeechStarted
            assert UtteranceDelta not in kinds[kinds.index(UtteranceFinal) :]


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ground]:
    """``@pytest.mark.parametrize("base", [{…settings}], indirect=True)`` for other settings than these."""
    environment = {
        "NAPSCRIBE_MODEL": "embedded",
        "NAPSCRIBE_RUNTIME_DIR": "/tmp",
        "NAPSCRIBE_SPOOL_DIR": str(tmp_path / "spool"),
        **getattr(request, "param", {}),
    }
    with ground(load(environment)) as made:
        yield made


OpenCall = Callable[..., "asyncio.Future[Call]"]


@pytest.fixture
async def running(base: Ground) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(gateway(base))


def open_call(running: Gateway, **options: object) -> tuple[Call, asyncio.Task[None]]:
    """A call and the task that listens to it until its end."""
    chosen = StreamOptions(audio=RawAudio("s16le", 16_000), **options)  # type: ignore[arg-type]
    call = Call(running, running.hub.open(f"call-{id(options)}", chosen))
    return call, asyncio.ensure_future(call.listen())
