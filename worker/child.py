"""A process of the worker's own, for work that would share the interpreter with the engine: how it is started, and whole messages
over a pair of sockets.

A message is received in a single call, so that a thread asks for the interpreter once and not for every buffer of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

from shared import journal
from worker.guard import die_with, die_with_any_thread

START_SECONDS = 20.0
"""A child takes half a second to start; one that takes so long is none."""

_LENGTH = struct.Struct("<Q")


class NoChild(Exception):  # it says what is the case
    """A child cannot be started."""


def send(line: socket.socket, body: bytes) -> None:
    """Raises ConnectionError if the other end is gone."""
    line.sendall(_LENGTH.pack(len(body)) + body)


def receive(line: socket.socket) -> bytearray:
    """The next message. Raises ConnectionError if the other end is gone."""
    head = _exactly(line, _LENGTH.size)
    return _exactly(line, _LENGTH.unpack(head)[0])


def _exactly(line: socket.socket, length: int) -> bytearray:
    body = bytearray(length)
    rest = memoryview(body)
    while rest:
        count = line.recv_into(rest, len(rest), socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the other end is gone")
        rest = rest[count:]
    return body


def start(
    module: str, greeting: bytes, share: Sequence[int] = (), seconds: float | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run ``module`` as a child, which ends with the thread that calls this, and wait for its answer to ``greeting``, for START_SECONDS or
    ``seconds``. ``share``: descriptors that it may use under the same numbers. Raises NoChild."""
    with contextlib.ExitStack() as undo:
        try:
            ours, theirs = map(undo.enter_context, socket.socketpair())
            argv = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *share])
            theirs.close()
            undo.callback(child.wait)
            undo.callback(child.kill)
            ours.settimeout(seconds or START_SECONDS)
            send(ours, greeting)
            receive(ours)
            ours.settimeout(None)
        except OSError as error:
            raise NoChild(f"{module} does not start: {error}") from error
        undo.pop_all()
    return child, ours


def begin(name: str) -> socket.socket:
    """The child's first act: its end of the line. ``name`` is what the journal calls it."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with(parent)
    die_with_any_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    journal.bind(process=name, pid=os.getpid())
    return socket.socket(fileno=descriptor)
