"""One worker process: spawn it in a group of its own, read what it says on stderr, signal the group, reap. No policy."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from gateway.life.channel import Channel

STDERR_TAIL_LINES = 40
MAX_LINE_BYTES = 4096
MAX_LINES_PER_SECOND = 500
"""Lines beyond it are not forwarded: a worker that floods its stderr slows nobody down."""

LAST_WORDS_SECONDS = 0.2
"""For the pipe to end after the worker has. What the worker itself wrote is there by then, but a process outside of its group
may hold it open."""
REAP_SECONDS = 1.0
"""For children of a worker to end after SIGKILL; one in an uninterruptible wait must not hold up the next start."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """A started worker. Its stderr is always drained, so it can never block on it.

    The end of the process and the end of its stderr are two things: what it forked may hold the pipe open. That is why this is a
    protocol of its own: ``asyncio.subprocess.Process.wait`` waits for both in some versions of Python (gh-119710).
    """

    def __init__(self) -> None:
        self.pid = 0
        self.tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        self._transport: asyncio.SubprocessTransport | None = None
        self._exited, self._drained = asyncio.Event(), asyncio.Event()
        self._rest = b""
        self._window = 0.0
        self._lines = 0

    @classmethod
    async def spawn(cls, argv: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> WorkerProcess:
        """Start ``argv`` in its own session and process group; it inherits ``descriptors``. Raises OSError."""
        _transport, process = await asyncio.get_running_loop().subprocess_exec(
            cls,
            *argv,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
        )
        return process

    def signal(self, number: signal.Signals) -> None:
        """Send to the whole group; a group that is gone is fine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def wait(self) -> str:
        """Reap, end what the worker may have forked, and say how it ended."""
        await self._exited.wait()
        self.signal(signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained.wait(), LAST_WORDS_SECONDS)
        await self._reap_orphans()
        self._end_of_stderr()  # where somebody else holds the pipe open
        assert self._transport is not None
        code = self._transport.get_returncode()
        assert code is not None
        self._transport.close()
        return describe_exit(code)

    async def _reap_orphans(self) -> None:
        """As the first process of a container we inherit what the worker had started, and nobody else buries it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + REAP_SECONDS
        while loop.time() < end:
            try:
                dead = os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - it does not wait
            except ChildProcessError:  # none is ours, or none is left
                return
            if dead is None:
                await asyncio.sleep(0.01)

    # ------------------------------------------------------------ what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport, self.pid = transport, transport.get_pid()

    def process_exited(self) -> None:
        self._exited.set()

    def pipe_data_received(self, _fd: int, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        self._take(lines)

    def pipe_connection_lost(self, _fd: int, _exc: Exception | None) -> None:
        self._end_of_stderr()
        self._drained.set()

    def _end_of_stderr(self) -> None:
        """What is left without an end of line."""
        rest, self._rest = self._rest, b""
        if rest:
            self._take([rest])

    def _take(self, lines: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._window >= 1:
            self._window, self._lines = now, 0
        room = max(0, MAX_LINES_PER_SECOND - self._lines)
        self._lines += len(lines)
        for line in lines[:room]:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(_readable(line) + "\n")
        self.tail.extend(map(_readable, lines[-STDERR_TAIL_LINES:]))


def _readable(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode(errors="replace")


def worker_command(channel: Channel, options: Sequence[str], override: str = "") -> Callable[[int, int], Sequence[str]]:
    """The argv of a generation; ``options`` are passed on as they are, ``override`` is the command line of another worker.

    ``-P`` keeps the user's folder off the path: it may hold a ``worker`` of its own.
    """
    import shlex

    start = shlex.split(override) if override else [sys.executable, "-P", "-m", "worker"]
    fixed = ["--data", channel.data_address, "--control", channel.control_address, "--parent", str(os.getpid())]

    def command(generation: int, recorder: int) -> Sequence[str]:
        return [*start, *fixed, "--generation", str(generation), "--recorder", str(recorder), *options]

    return command


def describe_exit(code: int) -> str:
    """``exit 3`` or ``SIGKILL``."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def resident_bytes(pid: int | str) -> int:
    """Resident memory of a process (``self`` is this one) in bytes, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:  # noqa: PTH123 - procfs never blocks
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
