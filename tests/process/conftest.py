"""The seam without HTTP: real channel, supervisor and dispatcher on this loop, a real worker process at the other end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from gateway.jobs.dispatch import Dispatcher
from gateway.jobs.file_job import FileJob
from gateway.life.channel import Channel
from gateway.life.lifecycle import Phase, Policy
from gateway.life.process import worker_command
from gateway.life.supervisor import Lease, Supervisor
from gateway.private_folder import PrivateFolder
from shared.messages import Delta, Event, Failed, FileDone, FileOptions, Lane, SegmentDone

FAST = Policy(idle_s=60, start_stall_s=10, stop_s=0.3, cooldown_s=0.05, cooldown_max_s=0.2)


@dataclass
class Seam:
    channel: Channel
    supervisor: Supervisor
    dispatcher: Dispatcher
    folder: Path
    trace: Path
    events: list[Event] = field(default_factory=list)
    reclaims: int = 0
    jobs: int = 0

    def submit(self, segments: int = 3, lane: Lane = Lane.BATCH, prompt: str = "") -> tuple[FileJob, Lease]:
        """Queue a "recording" of so many segments (see tests/fakes/worker.py)."""
        self.jobs += 1
        path = self.folder / f"recording-{self.jobs}"
        path.write_bytes(bytes(1000 * segments))
        job = FileJob(f"r{self.jobs}", lane, path, FileOptions(prompt=prompt))
        lease = self.supervisor.lease()
        self.dispatcher.submit(job)
        return job, lease

    async def transcribe(self, segments: int = 3, lane: Lane = Lane.BATCH, prompt: str = "") -> list[str]:
        """Texts of a job's segments. Raises its error."""
        job, lease = self.submit(segments, lane, prompt)
        with lease:
            await job.result()
        return [segment.text for segment in job.segments]

    def steps(self) -> list[tuple[int, str, int]]:
        """What workers began: generation, request, segment."""
        if not self.trace.exists():
            return []
        rows = (line.split() for line in self.trace.read_text().splitlines())
        return [(int(generation), request, int(index)) for generation, request, index in rows]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll a condition of the outside world (processes, files), bounded."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)
        assert condition(), what

    async def phase(self, phase: Phase) -> None:
        await self.until(lambda: self.supervisor.phase is phase, f"phase {phase}")

    @property
    def pid(self) -> int:
        pid = self.supervisor.report()["pid"]
        assert isinstance(pid, int)
        return pid


StartSeam = Callable[..., Awaitable[Seam]]


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A private folder with a short path: that of a socket is limited."""
    with PrivateFolder(Path("/tmp"), "napscribe-test-") as private:
        yield private.path


@pytest.fixture
async def seam(tmp_path: Path, sockets: Path) -> AsyncIterator[StartSeam]:
    """``await seam("--die-after 2", policy=…)``: a seam whose workers are fakes with those flags. One a test."""
    async with AsyncExitStack() as stack:

        async def start(
            flags: str = "", policy: Policy = FAST, queue_seconds: float = 60, max_queue: int = 100
        ) -> Seam:
            return await stack.enter_async_context(_seam(tmp_path, sockets, flags, policy, queue_seconds, max_queue))

        yield start


@asynccontextmanager
async def _seam(
    tmp_path: Path, sockets: Path, flags: str, policy: Policy, queue_seconds: float, max_queue: int
) -> AsyncIterator[Seam]:
    trace = tmp_path / "trace"
    fake = f"{shlex.quote(sys.executable)} -m tests.fakes.worker --trace {trace} {flags}"

    def route(event: Event, _payload: object) -> None:
        made.events.append(event)
        if isinstance(event, Delta | SegmentDone | FileDone | Failed):
            made.dispatcher.handle(event)
        else:
            made.supervisor.handle(event)

    def reclaim() -> None:
        made.reclaims += 1

    channel = Channel(sockets, route, lambda *about: made.supervisor.garbage(*about))
    dispatcher = Dispatcher(channel, max_queue, queue_seconds)
    supervisor = Supervisor(policy, channel, worker_command(channel, ["--model", "fake"], fake), [dispatcher], reclaim)
    dispatcher.supervisor = supervisor
    made = Seam(channel, supervisor, dispatcher, tmp_path, trace)
    try:
        yield made
    finally:
        await asyncio.wait_for(supervisor.aclose(), 10)
        channel.close()


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
