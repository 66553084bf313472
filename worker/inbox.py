"""The worker's end of the wire: one thread owns both sockets, so that pings are answered while the engine is busy.

Commands wait in ``take()`` for the scheduler; events of any thread go out through ``emit()``, in order, bounded: a
gateway that does not read makes ``emit`` wait, never lose.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable

import zmq

from shared.codec import Buffer, decode_command, encode
from shared.errors import ProtocolError
from shared.journal import log
from shared.messages import PROTOCOL_VERSION, Command, Event, Hello, Ping, Pong, Stop, TranscribeFile
from shared.streams import StreamCommand

HIGH_WATER_MARK = 1000
"""Messages in ZeroMQ's own pipe."""
MAX_WAITING = 10_000
"""Events that wait here for a full pipe before ``emit`` blocks."""
LEAVE_SECONDS = 1.0
"""After a stop command the process ends by itself within this time, whatever its other threads do."""


class Bell:
    """Wakes the scheduler: rung by the socket thread and by the audio threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None = None) -> None:
        """Return when rung since the last wait, or after ``seconds``."""
        self._event.wait(seconds)
        self._event.clear()


class Inbox:
    """Both sockets and their thread."""

    def __init__(self, data: str, control: str, generation: int, bell: Bell, pulse: Callable[[int], Pong]) -> None:
        """``pulse(sequence)`` makes the answer to a ping, on the socket thread: it must not wait for anything."""
        self.generation = generation
        self.stopping = threading.Event()
        self._bell = bell
        self._pulse = pulse
        self._commands: collections.deque[Command] = collections.deque()
        self._ears: Callable[[Command, Buffer], None] | None = None
        self._files: Callable[[TranscribeFile], None] | None = None
        self._outbox: collections.deque[bytes] = collections.deque()
        self._room = threading.Semaphore(MAX_WAITING)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._addresses = (data, control)
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.emit(Hello(self.generation, PROTOCOL_VERSION, os.getpid()))

    def emit(self, event: Event) -> None:
        """Send from any thread. Waits while the bound is reached."""
        self.emit_encoded(encode(event))

    def emit_encoded(self, header: bytes) -> None:
        """As ``emit``, for who has encoded the event already."""
        self._room.acquire()
        self._outbox.append(header)
        os.eventfd_write(self._wake, 1)

    def hear(self, ears: Callable[[Command, Buffer], None]) -> None:
        """Where commands of live streams go, straight from the socket. Once, before ``Ready`` is said."""
        self._ears = ears

    def announce(self, files: Callable[[TranscribeFile], None]) -> None:
        """Who is told of a file at once, on the socket thread, before ``take`` gives its command. Once, before ``Ready`` is said."""
        self._files = files

    def take(self) -> list[Command]:
        """All other commands that have come, in order of arrival."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def drain(self, seconds: float) -> None:
        """Wait until everything emitted has been handed to ZeroMQ, and a little longer for its own thread."""
        deadline = time.monotonic() + seconds
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.02)

    # ------------------------------------------------------------ the socket thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        data, control = (self._connect(context, address) for address in self._addresses)
        poller = zmq.Poller()
        poller.register(control, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            poller.register(data, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            ready = dict(poller.poll())
            if control in ready:
                self._receive_control(control)
            if data in ready:
                self._receive_data(data)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._flush(data)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"generation-%d" % self.generation)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(address)
        return socket

    def _flush(self, data: zmq.Socket[bytes]) -> None:
        while self._outbox:
            try:
                data.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()
            self._room.release()

    def _receive_data(self, socket: zmq.Socket[bytes]) -> None:
        for command, payload in _receive(socket):
            if isinstance(command, StreamCommand) and self._ears is not None:
                self._ears(command, payload)
                continue
            if isinstance(command, TranscribeFile) and self._files is not None:
                self._files(command)
            self._commands.append(command)
            self._bell.ring()

    def _receive_control(self, socket: zmq.Socket[bytes]) -> None:
        for command, _payload in _receive(socket):
            if isinstance(command, Ping):
                socket.send(encode(self._pulse(command.sequence)))
                continue
            if isinstance(command, Stop):
                self.stopping.set()
                timer = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
                timer.daemon = True
                timer.start()
            self._commands.append(command)
            self._bell.ring()


def _receive(socket: zmq.Socket[bytes]) -> list[tuple[Command, Buffer]]:
    received: list[tuple[Command, Buffer]] = []
    while True:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return received
        try:
            received.append(decode_command(frames))
        except ProtocolError as error:
            log("garbage on the channel", level="error", error=str(error))
