"""The ears in a process of their own, beside an engine on a GPU.

Under hundreds of calls the engine's own Python keeps one core busy, and so do decoding, voice activity and endpointing; threads of
one interpreter would share that core. So a child listens, and what it finds comes back, a message for each of its turns. It holds
nothing that cannot be heard again: if it dies, the worker ends with it, and the next generation goes on as after any crash.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shared.codec import Buffer, encode
from shared.errors import NapscribeError, from_code
from shared.journal import log
from shared.messages import Capabilities, Command, Event
from shared.recorder import Recorder
from shared.streams import StreamCommand
from worker.audio.samples import Audio
from worker.child import NoChild, begin, receive, send, start
from worker.live.endpointing import Begin, End, Pause, Speech
from worker.live.happenings import Answer, Arrival, Cleared, Closed, Happening, Opened, Released, Updated

if TYPE_CHECKING:
    from worker.live.audio import Tell


START_SECONDS = 60.0
"""It starts while the engine reads gigabytes, perhaps from the same slow disk."""
MOST_ITEMS = 256
"""Of a message to the worker; what is found beyond it in a turn goes in another one."""


# ---------------------------------------------------------------- what they say to each other


class _Hello(msgspec.Struct, array_like=True):
    recorder: int
    """Descriptor of the flight recorder: whose audio is in hand is known after a crash, too."""


class _Serve(msgspec.Struct, array_like=True):
    generation: int
    capabilities: Capabilities
    cores: tuple[int, ...]
    """Those of the worker, which may have moved near its card since the child was started."""


class _Command(msgspec.Struct, array_like=True, tag=True):
    command: StreamCommand
    payload: memoryview


class _FinalSaid(msgspec.Struct, array_like=True, tag=True):
    request_id: str
    utterance: int


class _Event(msgspec.Struct, array_like=True, tag=True):
    """For the gateway: an encoded event."""

    header: bytes


class _Sound(msgspec.Struct, array_like=True, tag=True):
    """``Speech`` whose samples are the next ones of the message's audio."""

    request_id: str
    utterance: int
    samples: int


class _Failure(msgspec.Struct, array_like=True, tag=True):
    request_id: str
    code: str
    message: str
    hint: str
    param: str | None


class _Happened(msgspec.Struct, array_like=True, tag=True):
    request_id: str
    happening: Begin | Pause | End | Answer | Cleared | Closed | Opened | Updated | Released
    arrival: Arrival | None


class _Turn(msgspec.Struct, array_like=True):
    """What the child found in a turn, or in a part of one, in order."""

    taken: int
    """Commands that it has dealt with since its start."""
    items: list[_Event | _Sound | _Failure | _Happened]
    audio: memoryview
    """Float32 samples of all ``_Sound``, one behind the other."""


_pack = msgspec.msgpack.Encoder().encode
_hello_of = msgspec.msgpack.Decoder(_Hello).decode
_serve_of = msgspec.msgpack.Decoder(_Serve).decode
_given_of = msgspec.msgpack.Decoder(_Command | _FinalSaid).decode
_turn_of = msgspec.msgpack.Decoder(_Turn).decode


# ---------------------------------------------------------------- the worker's side


class EarsProcess:
    """``LiveAudio`` in a child, to be used like it. The child starts at once, beside whatever else starts; it serves after ``connect``."""

    apart = True

    def __init__(self, recorder: int, died: Callable[[], None]) -> None:
        """``recorder``: descriptor of the flight recorder. ``died`` is called on a thread of this object if a child that served has
        died."""
        self._recorder = recorder
        self._died = died
        self._outbox: collections.deque[_Command | _FinalSaid] = collections.deque()
        """What the child has not been sent yet. The gateway bounds it: two seconds of each stream are on their way at most."""
        self._wanted = threading.Event()
        self._given: collections.deque[int] = collections.deque()
        """When the commands were given that the child has not dealt with."""
        self._taken = 0
        self._tried = threading.Event()
        self._serving = threading.Event()
        self._line: socket.socket | None = None
        self._failure = ""
        self._connected = False
        self._pid = 0
        # The kernel ends a child with the thread that started it, so this one stays, and reads.
        self._thread = threading.Thread(target=self._run, name="ears", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the child; 0 before it runs."""
        return self._pid

    def connect(
        self,
        generation: int,
        capabilities: Capabilities,
        cores: tuple[int, ...],
        emit: Callable[[bytes], None],
        tell: Tell,
        bell: Callable[[], None],
    ) -> None:
        """Let the child serve. ``emit`` gets encoded events; ``tell`` as in ``LiveAudio``, and ``bell`` is rung after what is told together.
        Raises NoChild if there is none."""
        self._tried.wait()
        if self._line is None:
            raise NoChild(self._failure)
        self._emit, self._tell, self._bell = emit, tell, bell
        try:
            send(self._line, _pack(_Serve(generation, capabilities, cores)))
        except OSError as error:
            raise NoChild(f"the ears' process has gone: {error}") from error
        self._connected = True
        self._serving.set()
        threading.Thread(target=self._send, args=(self._line,), name="to-ears", daemon=True).start()

    def close(self) -> None:
        """The child is not wanted, or no more: it leaves, and nobody is told of it."""
        self._tried.wait()
        self._connected = False
        self._serving.set()
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has gone already
                self._line.shutdown(socket.SHUT_RDWR)
        self._wanted.set()
        self._thread.join()

    def give(self, command: Command, payload: Buffer) -> None:
        """As ``LiveAudio.give``."""
        assert isinstance(command, StreamCommand)
        self._given.append(time.monotonic_ns())
        self._outbox.append(_Command(command, memoryview(payload)))
        self._wanted.set()

    def final_said(self, request_id: str, utterance: int) -> None:
        """As ``LiveAudio.final_said``."""
        self._outbox.append(_FinalSaid(request_id, utterance))
        self._wanted.set()

    def age_ns(self) -> int:
        """How long the oldest command has been waiting for the child to have dealt with it; 0 when there is none."""
        try:
            return time.monotonic_ns() - self._given[0]
        except IndexError:
            return 0

    # ------------------------------------------------------------ its threads

    def _run(self) -> None:
        try:
            child, line = start(__name__, _pack(_Hello(self._recorder)), [self._recorder], START_SECONDS)
        except NoChild as error:
            self._failure = str(error)
            self._tried.set()
            return
        self._line, self._pid = line, child.pid
        self._tried.set()
        self._serving.wait()
        with line, contextlib.suppress(OSError):
            while self._connected:
                self._hear(_turn_of(receive(line)))
        code = child.wait()
        if self._connected:
            log("the ears died", level="error", ears=child.pid, exit=code)
            self._died()

    def _send(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other thread sees it, too
            while self._connected:
                self._wanted.wait()
                self._wanted.clear()
                while self._outbox:
                    send(line, _pack(self._outbox.popleft()))

    def _hear(self, turn: _Turn) -> None:
        for _ in range(turn.taken - self._taken):
            self._given.popleft()
        self._taken = turn.taken
        audio, at = np.frombuffer(turn.audio, np.float32), 0
        for item in turn.items:
            match item:
                case _Sound(request_id=request_id, utterance=utterance, samples=samples):
                    # A copy: the utterance keeps it, and must not keep the sound of all streams with it.
                    self._tell(request_id, Speech(utterance, audio[at : at + samples].copy()), None)
                    at += samples
                case _Happened(request_id=request_id, happening=happening, arrival=arrival):
                    self._tell(request_id, happening, arrival)
                case _Event(header=header):
                    self._emit(header)
                case _Failure():
                    error = from_code(item.code, item.message, hint=item.hint, param=item.param)
                    self._tell(item.request_id, error, None)
        if turn.items:
            self._bell()


# ---------------------------------------------------------------- the child's side


class _Child:
    """Gathers what the ears tell, and sends it when they have done what there was to do. All on their thread, but ``serve``."""

    def __init__(self, line: socket.socket) -> None:
        from worker.audio.vad import load_vad
        from worker.live import audio  # noqa: F401  # it takes a while, and nobody waits yet

        self._line = line
        self._recorder = Recorder(_hello_of(receive(line)).recorder)
        self._vad = load_vad()
        self._taken = 0
        self._items: list[_Event | _Sound | _Failure | _Happened] = []
        self._audio: list[Audio] = []

    def serve(self) -> None:
        """Until the worker closes its end, or is gone."""
        from worker.cores import pin
        from worker.live.audio import LiveAudio

        send(self._line, b"")
        asked = _serve_of(receive(self._line))
        pin(asked.cores)
        ears = LiveAudio(
            asked.generation, self._emit, self._tell, self._vad, asked.capabilities, self._recorder, self._turned
        )
        ears.start()
        while True:
            match _given_of(receive(self._line)):
                case _Command(command=command, payload=payload):
                    ears.give(command, payload)
                case _FinalSaid(request_id=request_id, utterance=utterance):
                    ears.final_said(request_id, utterance)

    def _emit(self, event: Event) -> None:
        self._items.append(_Event(encode(event)))
        self._send_many()

    def _tell(self, request_id: str, happening: Happening, arrival: Arrival | None) -> None:
        match happening:
            case Speech(utterance=utterance, audio=audio):
                self._items.append(_Sound(request_id, utterance, len(audio)))
                self._audio.append(audio)
            case NapscribeError() as error:
                self._items.append(_Failure(request_id, error.code, error.message, error.hint, error.param))
            case _:
                self._items.append(_Happened(request_id, happening, arrival))
        self._send_many()

    def _send_many(self) -> None:
        """A turn may take seconds, where much has waited; the engine need not."""
        if len(self._items) >= MOST_ITEMS:
            self._turned(self._taken)

    def _turned(self, taken: int) -> None:
        if taken == self._taken and not self._items:
            return
        self._taken = taken
        audio: Any = np.concatenate(self._audio) if self._audio else np.zeros(0, np.float32)
        turn = _Turn(taken, self._items, memoryview(audio).cast("B"))
        self._items, self._audio = [], []
        with contextlib.suppress(ConnectionError):  # the thread that listens to the worker ends the process
            send(self._line, _pack(turn))


def main() -> None:
    with begin("ears") as line, contextlib.suppress(ConnectionError):
        _Child(line).serve()
    os._exit(0)  # native threads may hang in their destructors


if __name__ == "__main__":
    main()
