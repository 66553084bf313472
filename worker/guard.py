"""A process dies with its parent, and with any of its threads: a killed gateway leaves no process behind, least of all one that holds
a GPU, and nobody waits for a thread that is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

EXIT_BUG = 1
_PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent goes, and look for ourselves: the kernel speaks of the parent *thread*,
    and says nothing if the parent went before we asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_any_thread() -> None:
    """A thread that dies of a mistake of ours would be missed by nobody, and everybody would wait for it: another process is better."""
    threading.excepthook = _end_with


def _end_with(died: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(died)
    sys.stderr.flush()
    os._exit(EXIT_BUG)
