"""The gateway's end of the wire: two ROUTER sockets on ``ipc://`` in a private folder.

Data carries jobs and their events; control carries cancel, ping and stop, so that they pass a full data pipe. ZeroMQ
loses silently at its high-water mark unless it is told not to: ``ROUTER_MANDATORY`` makes a full pipe EAGAIN and a gone
peer EHOSTUNREACH. What a full pipe refuses waits here in order, bounded; beyond the bound the sender gets ChannelFull.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from pathlib import Path

import zmq

from shared.codec import Buffer, decode_event, encode
from shared.errors import ChannelFull, NapscribeError, ProtocolError, WorkerGone
from shared.messages import Command, Event
from shared.streams import AudioBatch

HIGH_WATER_MARK = 1000
"""Messages in ZeroMQ's own pipe to one peer."""
MAX_WAITING = 10_000
"""Messages that wait here while the pipe is full."""
RETRY_SECONDS = 0.005
"""A full ROUTER gives no edge when one peer's pipe has room again, so it is asked."""
EVENTS_PER_TURN = 256
"""Read at most so many before other tasks of the loop get their turn."""
AUDIO_SECONDS = 0.01
"""Live frames that come within this time of the last ones sent go together; a frame after a longer silence goes at once."""
AUDIO_BYTES = 256 * 1024
"""So many bytes go without waiting."""
MAX_SOCKET_PATH = 107
"""sockaddr_un.sun_path, less its terminator."""


EventSink = Callable[[Event, Buffer], None]
GarbageSink = Callable[[int, ProtocolError], None]

# As plain numbers: arithmetic on the flags of the library takes as long as a send.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


def identity(generation: int) -> bytes:
    """The routing id that a worker of this generation uses on both sockets."""
    return b"generation-%d" % generation


class _Router:
    """One ROUTER socket on the running loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, sink: Callable[[list[bytes]], None]
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.deque[tuple[bytes, bytes, Buffer | None]] = collections.deque()
        self._retry: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._closed = False

    def send(self, peer: bytes, header: bytes, payload: Buffer | None) -> None:
        if self._waiting:
            if len(self._waiting) >= MAX_WAITING:
                raise ChannelFull("The worker does not read its messages.", retry_after=1)
            self._waiting.append((peer, header, payload))
            return
        if not self._try_send(peer, header, payload):
            self._waiting.append((peer, header, payload))
            self._retry = self._loop.call_later(RETRY_SECONDS, self._flush)

    def forget(self, peer: bytes) -> None:
        """Drop what waits for a peer that is gone."""
        self._waiting = collections.deque(item for item in self._waiting if item[0] != peer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        for handle in (self._retry, self._turn):
            if handle is not None:
                handle.cancel()
        self._socket.close()

    def _try_send(self, peer: bytes, header: bytes, payload: Buffer | None) -> bool:
        try:
            self._socket.send(peer, _MORE)
            if payload is None:
                self._socket.send(header, _LAST)
            else:
                self._socket.send(header, _MORE)
                self._socket.send(payload, _LAST)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise WorkerGone("The worker is not connected.", retry_after=1) from None
            raise
        finally:
            self._read_soon()  # the descriptor is edge-triggered: a send may have swallowed the edge of a receive
        return True

    def _flush(self) -> None:
        while self._waiting:
            peer, header, payload = self._waiting[0]
            try:
                if not self._try_send(peer, header, payload):
                    self._retry = self._loop.call_later(RETRY_SECONDS, self._flush)
                    return
            except WorkerGone:
                self.forget(peer)
                continue
            self._waiting.popleft()

    def _read_soon(self) -> None:
        if self._turn is None and not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._turn = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for _ in range(EVENTS_PER_TURN):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._sink(frames)
        self._read_soon()


class Channel:
    """Both sockets, typed. ``on_event`` and ``on_garbage`` are called on the loop, in order of arrival."""

    def __init__(self, folder: Path, on_event: EventSink, on_garbage: GarbageSink) -> None:
        self.data_address = _address(folder / "data")
        self.control_address = _address(folder / "control")
        self._on_event = on_event
        self._on_garbage = on_garbage
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._data = _Router(self._context, self.data_address, self._deliver)
        self._control = _Router(self._context, self.control_address, self._deliver)
        self._loop = asyncio.get_running_loop()
        self._frames: list[tuple[str, int, int]] = []
        self._payloads: list[bytes] = []
        self._payload_bytes = 0
        self._audio_generation = 0
        self._audio_sent = 0.0
        self._audio_timer: asyncio.TimerHandle | None = None

    def send(self, command: Command, payload: Buffer | None = None) -> None:
        """Data. Raises WorkerGone or ChannelFull; never blocks, never loses."""
        if self._frames:
            self._send_audio()
        try:
            self._data.send(identity(command.generation), encode(command), payload)
        except ChannelFull:
            # Whoever sent it waits for the next worker to say it to, so there must be a next one.
            self._on_garbage(command.generation, ProtocolError("it does not read its commands"))
            raise

    def audio(self, generation: int, request_id: str, arrived_ns: int, data: bytes) -> None:
        """A frame of live audio, in order with ``send``. Frames of one generation at a time: the hub sees to it.

        What cannot be sent is lost here, and said again by the stream's replay buffer once the worker is known to be gone.
        """
        self._frames.append((request_id, arrived_ns, len(data)))
        self._payloads.append(data)
        self._payload_bytes += len(data)
        self._audio_generation = generation
        if arrived_ns * 1e-9 >= self._audio_sent + AUDIO_SECONDS or self._payload_bytes >= AUDIO_BYTES:
            self._send_audio()
        elif self._audio_timer is None:
            self._audio_timer = self._loop.call_at(self._audio_sent + AUDIO_SECONDS, self._send_audio)

    def _send_audio(self) -> None:
        if self._audio_timer is not None:
            self._audio_timer.cancel()
            self._audio_timer = None
        if not self._frames:
            return
        self._audio_sent = self._loop.time()
        batch = AudioBatch(self._audio_generation, tuple(self._frames))
        payload = self._payloads[0] if len(self._payloads) == 1 else b"".join(self._payloads)
        self._frames.clear()
        self._payloads.clear()
        self._payload_bytes = 0
        try:
            self._data.send(identity(batch.generation), encode(batch), payload)
        except WorkerGone:
            pass
        except ChannelFull:
            # Nobody would say these frames again to a worker that wakes up: it must not wake up.
            self._on_garbage(batch.generation, ProtocolError("it does not read its audio"))

    def control(self, command: Command) -> None:
        """Control. Raises WorkerGone or ChannelFull."""
        self._control.send(identity(command.generation), encode(command), None)

    def forget(self, generation: int) -> None:
        """Nothing more is for this generation."""
        self._frames.clear()
        self._payloads.clear()
        self._payload_bytes = 0
        peer = identity(generation)
        self._data.forget(peer)
        self._control.forget(peer)

    def close(self) -> None:
        if self._audio_timer is not None:
            self._audio_timer.cancel()
        self._data.close()
        self._control.close()
        self._context.term()

    def _deliver(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            event, payload = decode_event(rest)
            if identity(event.generation) != peer:
                raise ProtocolError(f"Generation {event.generation} spoke as {peer!r}.")
        except ProtocolError as error:
            self._on_garbage(_generation(peer), error)
            return
        self._on_event(event, payload)


def _generation(peer: bytes) -> int:
    """The generation in a routing id; -1 for a stranger's."""
    digits = peer.removeprefix(b"generation-")
    return int(digits) if digits.isdigit() and len(digits) < 10 else -1


def _address(path: Path) -> str:
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise NapscribeError(
            f"The socket path {path} is longer than {MAX_SOCKET_PATH} bytes.",
            hint="Set NAPSCRIBE_RUNTIME_DIR to a shorter folder.",
        )
    return f"ipc://{path}"
