"""One worker process: spawn it in a group of its own, read what it says on stderr, signal the group, reap. No policy."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from gateway.channel import Channel

STDERR_TAIL_LINES = 40
MAX_LINE_BYTES = 4096
MAX_LINES_PER_SECOND = 500
"""Lines beyond it are counted, not forwarded: a worker that floods its stderr slows nobody down."""


class WorkerProcess:
    """A started worker. Its stderr is always drained, so it can never block on it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.tail: collections.deque[str] = collections.deque(maxlen=STDERR_TAIL_LINES)
        self._window = 0.0
        self._lines = 0
        self._reader = asyncio.create_task(self._drain())

    @classmethod
    async def spawn(cls, argv: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> WorkerProcess:
        """Start ``argv`` in its own session and process group; it inherits ``descriptors``. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
        )
        return cls(process)

    def signal(self, number: signal.Signals) -> None:
        """Send to the whole group; a group that is gone is fine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def wait(self) -> str:
        """Reap, end what the worker may have forked, and say how it ended."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        # A forked child may still hold the pipe open: what the worker itself wrote is there by now.
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._reader, 0.2)
        return describe_exit(code)

    async def _drain(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-MAX_LINE_BYTES:]
            for line in lines:
                self._forward(line[:MAX_LINE_BYTES].decode(errors="replace"))
        if rest:
            self._forward(rest.decode(errors="replace"))

    def _forward(self, line: str) -> None:
        self.tail.append(line)
        now = asyncio.get_running_loop().time()
        if now - self._window >= 1:
            self._window, self._lines = now, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_SECOND:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(line + "\n")


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
