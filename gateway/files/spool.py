"""Uploads on disk, from their first byte until their job is over; only the path crosses to the worker.

Every gateway has a folder of its own inside the spool directory and holds a lock in it for as long as it lives, so
that two gateways can share the directory and a later one can tell the leftovers of a dead one from the files of a
living one. Nothing here touches the disk from the event loop: one thread does, in order, and it leaves when no file
is left.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from gateway.private_folder import PrivateFolder
from shared import errors

BATCH_BYTES = 256 * 1024
"""Bytes gathered before one write. An upload holds at most this much and the chunk that filled it."""

BUFFER_BYTES = 16 * 1024 * 1024
"""Bytes gathered by all uploads together; where they are many, each writes smaller batches."""

LEAST_BATCH_BYTES = 32 * 1024

RETRY_AFTER_S = 5.0
"""Seconds a caller is asked to wait when the spool is full: a job or two end in that time."""

_FOLDER_PREFIX = "gateway-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_MEMORY = {"tmpfs", "ramfs"}

Buffer = bytes | bytearray | memoryview

P = ParamSpec("P")
T = TypeVar("T")


class Spool:
    """The spool of one gateway: a private folder, a quota in bytes, and the thread that writes.

    ``directory`` may be shared with other gateways and other programs; it is created (mode 0700) if it is missing and
    left as it is otherwise. ``quota_bytes`` bounds the bytes of all files of this gateway together.
    Raises OSError where the directory cannot be made or written.
    """

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self._private = PrivateFolder(directory, _FOLDER_PREFIX)
        self.folder = self._private.path
        self.directory = self.folder.parent
        self.quota_bytes = quota_bytes
        self._guard = threading.Lock()  # over the three below: the disk thread gives bytes back, too
        self._used = 0
        self._live = 0
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._created = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that files of this gateway hold or have reserved."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved."""
        return max(0, self.quota_bytes - self._used)

    @property
    def batch_bytes(self) -> int:
        """Bytes that a file gathers before it writes, as many files as there are now."""
        return max(LEAST_BATCH_BYTES, min(BATCH_BYTES, BUFFER_BYTES // max(1, self._live)))

    @property
    def warning(self) -> str:
        """A sentence for the operator when uploads would fill memory instead of a disk; empty otherwise."""
        kind = filesystem_type(self.directory)
        if kind not in _IN_MEMORY:
            return ""
        return (
            f"The spool directory {self.directory} is on {kind}: every upload there takes memory. "
            "Point NAPSCRIBE_SPOOL_DIR at a disk."
        )

    def sweep(self) -> int:
        """Remove the folders of gateways that are dead; returns how many. Blocking: for the start, before serving."""
        return self._private.sweep()

    def create(self) -> SpoolFile:
        """A new, empty file. It appears on disk with its first batch."""
        with self._guard:
            self._created += 1
            self._live += 1
        return SpoolFile(self, self.folder / f"{self._created:08d}")

    async def settle(self) -> None:
        """Wait until everything asked of the disk so far is done, removals included."""
        with self._guard:
            executor = self._executor
        if executor is not None:
            with contextlib.suppress(RuntimeError):  # shut down in between: then all of it is done
                await asyncio.wrap_future(executor.submit(_nothing))

    def close(self) -> None:
        """Remove the folder with all that is in it. Blocking: for the end, after serving."""
        with self._guard:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        self._private.close()

    def reserve(self, amount: int) -> None:
        """Take bytes out of the quota. Raises SpoolFull, and then takes none."""
        with self._guard:
            if self._used + amount <= self.quota_bytes:
                self._used += amount
                return
        raise spool_full()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Run on the disk thread, after everything that was asked of it before."""
        with self._guard:
            if self._executor is None:
                if self._private.closed:
                    raise errors.ShuttingDown("The gateway is leaving.")
                self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="spool")
            return self._executor.submit(work, *args, **kwargs)

    def forget(self, reserved: int) -> None:
        """A file is gone: its bytes are free again, and after the last one the thread leaves."""
        with self._guard:
            self._used -= reserved
            self._live -= 1
            if self._live == 0 and self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None


class SpoolFile:
    """One upload. ``write`` while it arrives, ``close`` when it is whole, ``discard`` when nobody needs it any more.

    Bytes count against the quota from ``write`` (or ``reserve``) until ``discard`` has taken effect.
    """

    def __init__(self, spool: Spool, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes taken by ``write``."""
        self._spool = spool
        self._reserved = 0
        self._pending = bytearray()
        self._fd = -1  # belongs to the disk thread
        self._on_disk = False
        self._ended = False
        self._discarded = False

    def reserve(self, total: int) -> None:
        """Hold room for a file of ``total`` bytes at once instead of as they come. Raises SpoolFull."""
        if self._ended:
            raise ValueError("this spool file has ended")
        if total > self._reserved:
            self._spool.reserve(total - self._reserved)
            self._reserved = total

    async def write(self, data: Buffer) -> None:
        """Append; waits for the disk whenever a batch is full. The buffer is copied before this returns.

        Raises SpoolFull over the quota or on a full disk, NapscribeError on any other failure of the disk; either
        way the file is discarded.
        """
        try:
            self.reserve(self.size + len(data))
        except errors.SpoolFull:
            self.discard()
            raise
        self.size += len(data)
        self._pending += data
        if len(self._pending) >= self._spool.batch_bytes:
            await self._flush(self._append)

    async def close(self) -> None:
        """Write what is left. Afterwards the whole file is at ``path``; raises as ``write`` does."""
        if not self._ended:
            self._ended = True
            await self._flush(self._finish)

    def discard(self) -> None:
        """Remove the file and give its bytes back. Idempotent, never waits: the disk thread does it in its turn."""
        self._ended = True
        if self._discarded:
            return
        self._discarded = True
        self._pending = bytearray()
        if not self._on_disk:
            self._spool.forget(self._reserved)
            return
        with contextlib.suppress(errors.ShuttingDown):  # ``Spool.close`` removes the folder as a whole
            self._spool.submit(self._remove)

    async def _flush(self, work: Callable[[bytearray], None]) -> None:
        batch, self._pending = self._pending, bytearray()
        self._on_disk = True
        try:
            await asyncio.wrap_future(self._spool.submit(work, batch))
        except OSError as error:
            self.discard()
            if error.errno in _FULL:
                raise spool_full() from error
            raise errors.NapscribeError(
                f"The upload could not be written to the spool: {error.strerror}.",
                hint="The operator should look at NAPSCRIBE_SPOOL_DIR.",
            ) from error
        except BaseException:  # cancelled: what is on disk is not whole
            self.discard()
            raise

    # ------------------------------------------------------------ on the disk thread

    def _append(self, batch: bytearray) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        rest = memoryview(batch)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _finish(self, batch: bytearray) -> None:
        self._append(batch)
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)

    def _remove(self) -> None:
        try:
            self._close_fd()
        finally:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._spool.forget(self._reserved)


def spool_full() -> errors.SpoolFull:
    """The refusal of an upload that finds no room now."""
    return errors.SpoolFull(
        "There is no room for this upload now.",
        hint="Send it again later, or ask the operator to raise the spool's quota.",
        retry_after=RETRY_AFTER_S,
    )


def filesystem_type(path: Path) -> str:
    """Type of the filesystem under ``path`` (``ext4``, ``tmpfs``, …) by /proc/self/mountinfo; empty if unknown."""
    try:
        device = path.stat().st_dev
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in table.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2:3] == [wanted]:
            return source.split()[0]
    return ""


def _nothing() -> None:
    """A place in the queue."""
