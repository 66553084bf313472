"""A folder of our own below a shared parent: mode 0700, locked while its owner lives, swept by the next of us if it died.

Several gateways may share a parent. A folder belongs to whoever holds the lock of the file that is in it under its name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from shared.journal import log

_LOCK_NAME = "lock"


class PrivateFolder:
    """Made at once; ``close`` removes it. Also a context manager. Blocking: for the start and the end, not for the loop."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """``parent`` is made (mode 0700) if it is missing and left as it is otherwise. Raises OSError."""
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._parent = parent.resolve()
        self._prefix = prefix
        self.path, self._lock_fd = self._claim()

    def sweep(self) -> int:
        """Remove the folders of dead owners; returns how many."""
        swept = 0
        for entry in sorted(self._parent.glob(f"{self._prefix}*")):
            if entry == self.path or entry.is_symlink() or not entry.is_dir():
                continue
            try:
                swept += _sweep(entry)
            except OSError as error:  # somebody else's, or going away under our hands
                log("sweep failed", level="warning", folder=str(entry), error=error.strerror)
        return swept

    @property
    def closed(self) -> bool:
        return self._lock_fd < 0

    def close(self) -> None:
        """Remove the folder with all that is in it. Twice is once."""
        if self._lock_fd >= 0:
            _remove(self.path)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self) -> tuple[Path, int]:
        """A new folder and the descriptor whose lock says that its owner lives."""
        while True:
            folder = self._parent / f"{self._prefix}{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            lock = _lock(folder)
            if lock is not None:
                return folder, lock


def _lock(folder: Path) -> int | None:
    """The locked descriptor, or None if another process holds the lock or has just removed the folder.

    A sweeper may take a folder between its ``mkdir`` and this lock; whoever holds the lock of a file that is still
    there under its name is the owner.
    """
    path = folder / _LOCK_NAME
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _sweep(folder: Path) -> bool:
    lock = _lock(folder)
    if lock is None:
        return False
    try:
        _remove(folder)
    finally:
        os.close(lock)
    return True


def _remove(folder: Path) -> None:
    """Everything, the lock last, so that a half-done removal can be found again."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK_NAME:
            entry.unlink(missing_ok=True)
    (folder / _LOCK_NAME).unlink(missing_ok=True)
    folder.rmdir()
