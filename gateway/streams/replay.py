"""What a live stream has been told and may have to be told again: audio and commands, in order.

Two queues. ``sent`` is with the worker but may be lost with it; ``unsent`` waits for flow control, or for a worker. An
acknowledged and no longer needed entry is forgotten; when a worker dies, what was sent becomes unsent again.
"""

from __future__ import annotations

import collections

import msgspec

from shared.streams import StreamCommand, UpdateStream

IN_FLIGHT_SECONDS = 2.0
"""Audio that may be on its way to the worker without being acknowledged."""
PIECE_SECONDS = 0.5
"""A larger message is cut. The worker acknowledges in steps of a quarter of a second, so a piece always fits into the window
beside what it has not acknowledged yet; a message longer than the window would wait for ever."""


class Entry(msgspec.Struct, gc=False):
    """Audio (``data``) or a command, with its place in the stream of bytes."""

    offset: int
    data: bytes
    command: StreamCommand | None
    arrived_ns: int

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    @property
    def owed(self) -> bool:
        """A command whose answer has not come. New options are not: a reopened stream gets the latest at once."""
        return self.command is not None and not isinstance(self.command, UpdateStream)


class ReplayBuffer:
    """Bytes are counted from the start of the stream, over all generations."""

    def __init__(self, bytes_per_second: float) -> None:
        """``bytes_per_second`` of the encoding; for a container, whose rate nobody knows, a generous guess."""
        self.set_rate(bytes_per_second)
        self._sent: collections.deque[Entry] = collections.deque()
        self._unsent: collections.deque[Entry] = collections.deque()
        self.received = 0
        """Bytes taken from the client."""
        self.acknowledged = 0
        self.needed = 0
        """Everything before this byte is forgotten."""
        self.handed_out = 0
        """End of what has been given to the present worker."""

    @property
    def held_bytes(self) -> int:
        """Audio kept for replay and waiting to be sent."""
        return self.received - self.needed

    @property
    def waiting_seconds(self) -> float:
        """Audio that the worker has not taken yet."""
        return (self.received - self.acknowledged) / self._bytes_per_second

    @property
    def pending(self) -> bool:
        """Something has been given that the worker has not dealt with."""
        return self.received > self.acknowledged or any(e.owed for e in (*self._sent, *self._unsent))

    def add_audio(self, data: bytes, now_ns: int) -> None:
        size = self._piece_bytes
        if len(data) <= size:
            self._unsent.append(Entry(self.received, data, None, now_ns))
            self.received += len(data)
            return
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self._unsent.append(Entry(self.received, piece, None, now_ns))
            self.received += len(piece)

    def pass_on(self, data: bytes, now_ns: int) -> bool:
        """``add_audio`` and ``next`` in one: the caller sends ``data`` now. False, and nothing done, where it has to wait behind
        something else or for an acknowledgement, or is to be cut."""
        size = len(data)
        end = self.received + size
        if self._unsent or size > self._piece_bytes or end - self.acknowledged > self._window_bytes:
            return False
        self._sent.append(Entry(self.received, data, None, now_ns))
        self.received = self.handed_out = end
        return True

    @property
    def commands(self) -> int:
        """Commands that wait to be sent or answered."""
        return sum(entry.command is not None for entry in (*self._sent, *self._unsent))

    def set_rate(self, bytes_per_second: float) -> None:
        """Another encoding, before the first byte."""
        self._bytes_per_second = bytes_per_second
        self._piece_bytes = max(1, int(PIECE_SECONDS * bytes_per_second))
        self._window_bytes = IN_FLIGHT_SECONDS * bytes_per_second

    def add_command(self, command: StreamCommand, now_ns: int) -> None:
        """New options take the place of options that nobody has seen yet."""
        if isinstance(command, UpdateStream) and self._unsent and isinstance(self._unsent[-1].command, UpdateStream):
            self._unsent.pop()
        self._unsent.append(Entry(self.received, b"", command, now_ns))

    def take_commands(self) -> list[StreamCommand]:
        """Every command that waits or has no answer, in order; they are no longer kept. Audio stays."""
        commands = [entry.command for entry in (*self._sent, *self._unsent) if entry.command is not None]
        self._sent = collections.deque(entry for entry in self._sent if entry.data)
        self._unsent = collections.deque(entry for entry in self._unsent if entry.data)
        return commands

    def next(self) -> Entry | None:
        """What may be sent now; the caller has sent it when it calls again."""
        if not self._unsent:
            return None
        entry = self._unsent[0]
        if entry.data and entry.end - self.acknowledged > self._window_bytes:
            return None
        self._unsent.popleft()
        self._sent.append(entry)
        self.handed_out = entry.end
        return entry

    def acknowledge(self, received: int, needed: int) -> None:
        """The worker has everything up to byte ``received`` and needs nothing before ``needed``."""
        self.acknowledged = max(self.acknowledged, min(received, self.handed_out))
        self.forget(needed)

    def forget(self, needed: int) -> None:
        """Nothing before byte ``needed`` will be asked for again; commands stay until they are answered."""
        self.needed = max(self.needed, min(needed, self.handed_out))
        while self._sent and self._sent[0].end <= self.needed and not self._sent[0].owed:
            self._sent.popleft()

    def answered(self, command_type: type[StreamCommand], token: int | None = None) -> None:
        """The oldest sent command of this type (and token) has had its effect: it is not repeated."""
        for entry in self._sent:
            command = entry.command
            if isinstance(command, command_type) and (token is None or getattr(command, "token", None) == token):
                self._sent.remove(entry)
                break
        self.forget(self.needed)

    def rewind(self) -> int:
        """The worker is gone: everything it may have lost is unsent again. Returns the byte at which a resume starts."""
        again = [entry for entry in self._sent if entry.data or entry.owed]
        entries = [*again, *self._unsent]
        self._sent.clear()
        self._unsent.clear()
        for entry in entries:  # a command whose answer is late may stand before audio that is needed no more
            if entry.data and entry.offset < self.needed:
                entry.data, entry.offset = entry.data[self.needed - entry.offset :], self.needed
            if entry.data or entry.command is not None:
                self._unsent.append(entry)
        self.acknowledged = self.handed_out = self.needed
        return self.needed
