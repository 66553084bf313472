"""A folder of our own below a shared parent: mode 0700, locked while we live, swept by the next of us if we were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class PrivateFolder:
    """``with PrivateFolder(parent, prefix) as folder: folder.path``. Folders of dead owners are removed at entry."""

    def __init__(self, parent: Path, prefix: str) -> None:
        self._parent = parent
        self._prefix = prefix
        self._lock = -1
        self.path = Path()

    def __enter__(self) -> PrivateFolder:
        """Raises OSError if the parent cannot be written."""
        self._parent.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _sweep(self) -> None:
        for folder in self._parent.glob(self._prefix + "*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid() and _is_dead(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    """Whether nobody holds its lock. A folder without a lock file is just being made, or half removed: left alone if young."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        import time

        return time.time() - folder.stat().st_mtime > 60
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
