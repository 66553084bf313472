"""One live stream as its dialect sees it, over as many generations of the worker as it takes.

The dialect gives audio as it came and takes events; it never learns that a worker died, slept or woke. Every event it
gets is new: what a second generation says again is not said, because the stream is reopened with what was said.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from math import gcd

import msgspec

from gateway.streams.replay import Entry, ReplayBuffer
from shared.errors import AudioOverrun, NapscribeError, SlowReader
from shared.pcm import SAMPLE_RATE
from shared.streams import (
    AudioCleared,
    ClearAudio,
    CloseStream,
    EndUtterance,
    OpenStream,
    OpenUtterance,
    Parked,
    ParkStream,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamCommand,
    StreamDone,
    StreamEvent,
    StreamOptions,
    StreamProgress,
    UpdateStream,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
)
from shared.wire import RawAudio

HELD_SECONDS = 60.0
"""Audio a stream may have waiting for the worker; beyond it the client is too fast, or the worker away for too long."""
MAX_CONTAINER_BYTES = 32 * 1024 * 1024
"""A container cannot be entered in its middle, so all of it is kept for a replay, up to here."""
BACKPRESSURE_SECONDS = 10.0
"""From here on ``send`` waits for the worker: a client that sends faster than real time is slowed, not refused."""
MAX_COMMANDS = 1_000
"""Commands of a stream that may wait for the worker or for their answer."""
MAX_EVENTS = 5_000
"""Unread events that must not be lost, after which the client counts as gone."""
Transmit = Callable[[int, str, int, bytes], None]
"""``Channel.audio``: generation, stream, when it came, the frame."""
CONTAINER = "container"
_CONTAINER_BYTES_PER_SECOND = 192_000
"""Of the fattest container that carries speech, stereo PCM at 48 kHz: a guess that is too low would starve the decoder."""
_WIDTHS = {"s16le": 2, "f32le": 4, "s32le": 4, "mulaw": 1, "alaw": 1}
_CODED = {"g729": (10, 100)}
"""Encodings whose frames hold more than one sample: bytes of a frame, frames a second."""


class PcmClock:
    """Bytes of a headerless encoding as samples at 16 kHz, and back."""

    def __init__(self, audio: RawAudio) -> None:
        self.container = audio.encoding == CONTAINER
        coded = _CODED.get(audio.encoding)
        self._frame = 1 if self.container else coded[0] if coded else _WIDTHS[audio.encoding] * audio.channels
        self._rate = coded[1] if coded else audio.sample_rate or SAMPLE_RATE
        self._step = SAMPLE_RATE // gcd(SAMPLE_RATE, self._rate)
        self.bytes_per_second = _CONTAINER_BYTES_PER_SECOND if self.container else float(self._frame * self._rate)

    def byte_of(self, sample: int) -> int:
        """The byte from which decoding gives this sample or a few before it; always 0 in a container."""
        if self.container:
            return 0
        whole = sample - sample % self._step
        return whole * self._rate // SAMPLE_RATE * self._frame

    def sample_of(self, byte: int) -> int:
        """The sample that begins at a byte of ``byte_of``."""
        return 0 if self.container else byte // self._frame * SAMPLE_RATE // self._rate


@dataclass(slots=True)
class _Outbox:
    """Events for the dialect. Partials of an utterance replace each other, and so does progress; everything else stays, up
    to a bound."""

    events: collections.deque[StreamEvent] = field(default_factory=collections.deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: StreamEvent) -> None:
        """Raises SlowReader at the bound."""
        if isinstance(event, Partial | StreamProgress):
            for index in range(len(self.events) - 1, -1, -1):
                if _outdated(self.events[index], event):
                    del self.events[index]
                    break
        elif len(self.events) >= MAX_EVENTS:
            raise SlowReader(f"{MAX_EVENTS} events wait to be read.", hint="Read the socket while you send.")
        self.events.append(event)
        self.news.set()


def _outdated(waiting: StreamEvent, event: Partial | StreamProgress) -> bool:
    if isinstance(event, StreamProgress):
        return isinstance(waiting, StreamProgress)
    return isinstance(waiting, Partial) and waiting.utterance == event.utterance


class LiveStream:
    """Made by ``Hub.open``. Everything runs on the loop."""

    def __init__(
        self, stream_id: str, options: StreamOptions, changed: Callable[[LiveStream], None], transmit: Transmit
    ) -> None:
        """``changed``: there is something to send, or the stream has ended; the hub acts on it. ``transmit`` sends a frame."""
        self.id = stream_id
        self.options = options
        self.clock = PcmClock(options.audio)
        self.replay = ReplayBuffer(self.clock.bytes_per_second)
        self.last_audio = time.monotonic()
        self.generation = 0
        """The worker that has it; 0 if none."""
        self.closing = False
        self.ended = False
        self.crashes = 0
        """Crashes that count against it since it last moved on: said something for good, or guessed further than ever."""
        self.restarts = 0
        self.tells_progress = True
        """Whether the dialect is told of a ``StreamProgress``: they come four times a second, and few need them."""
        self.error: NapscribeError | None = None
        self._changed = changed
        self._transmit = transmit
        self._outbox = _Outbox()
        self._room = asyncio.Event()
        self._room.set()
        self._utterances: dict[int, OpenUtterance] = {}
        self._next_utterance = 0
        self._guessed_through = 0
        self._cleared_through = 0
        self._requested = -1
        """Utterance that an ``EndUtterance`` without an answer has ended."""
        self._tokens = 0
        self._base_byte = 0
        self._parking_byte = 0
        """Audio that went to the worker before it was asked to let go."""
        self._sent_options = options

    # ------------------------------------------------------------ for the dialect

    async def send(self, data: bytes) -> None:
        """Audio as it came. Waits while the worker is far behind; raises AudioOverrun if it stays so, or the stream's error."""
        self._check()
        if not data:
            return
        self.last_audio = time.monotonic()
        self.replay.add_audio(data, time.monotonic_ns())
        self._changed(self)
        if self.replay.waiting_seconds > BACKPRESSURE_SECONDS or self._overfull():
            await self._wait_for_room()

    def take_at_once(self, data: bytes) -> bool:
        """``send`` for audio that goes to the worker at once; False, and nothing done, if it cannot.

        A frame that passes here meets nothing else: the hub would look for what may be sent, and find just this.
        """
        if not data or not self.generation or self.ended or self.clock.container:
            return False
        now_ns = time.monotonic_ns()
        if not self.replay.pass_on(data, now_ns):
            return False
        self.last_audio = now_ns * 1e-9
        self._transmit(self.generation, self.id, now_ns, data)
        return True

    def end_utterance(self) -> int:
        """Finish what has been said so far; the ``UtteranceEnded`` with the returned token follows its final."""
        self._check()
        self._tokens += 1
        self._command(EndUtterance(0, self.id, self._tokens))
        return self._tokens

    def clear(self) -> None:
        """Forget audio that no utterance has finished; ``AudioCleared`` follows."""
        self._check()
        self._command(ClearAudio(0, self.id))

    def update(self, options: StreamOptions) -> None:
        """Other options from here on. The encoding cannot change once audio has come."""
        self._check()
        if self.replay.received and options.audio != self.options.audio:
            options = msgspec.structs.replace(options, audio=self.options.audio)
        elif options.audio != self.options.audio:
            self.clock = PcmClock(options.audio)
            self.replay.set_rate(self.clock.bytes_per_second)
        self.options = options
        self._command(UpdateStream(0, self.id, options))

    def finish(self) -> None:
        """No more audio; ``events`` ends after the last final."""
        if not self.closing and not self.ended:
            self.closing = True
            self._command(CloseStream(0, self.id))

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Everything that happens, in order, until the stream is done. Raises the stream's error.

        ``received_bytes`` of a ``StreamProgress`` counts from the start of the stream, over all generations.
        """
        while True:
            while self._outbox.events:
                event = self._outbox.events.popleft()
                yield event
                if isinstance(event, StreamDone):
                    return
            if self.error is not None:
                raise self.error
            if self.ended:
                return
            self._outbox.news.clear()
            await self._outbox.news.wait()

    @property
    def utterance_open(self) -> bool:
        """Speech has begun, or a final is still owed."""
        return bool(self._utterances)

    # ------------------------------------------------------------ for the hub

    def opening(self, generation: int) -> OpenStream:
        """The command that (re)opens the stream in this generation, where the last one left it."""
        self.generation = generation
        self._base_byte = self.replay.rewind()
        self._sent_options = self.options
        return OpenStream(
            generation,
            self.id,
            self.options,
            base_sample=self.clock.sample_of(self._base_byte),
            next_utterance=self._next_utterance,
            resumed=tuple(self._utterances.values()),
            floor_sample=self._cleared_through,
        )

    def outgoing(self) -> Entry | None:
        """What goes to the worker next, if flow control lets it go: audio, or a command for ``addressed``."""
        return self.replay.next()

    def addressed(self, command: StreamCommand) -> StreamCommand:
        """A command for the worker that has the stream now."""
        return msgspec.structs.replace(command, generation=self.generation)

    def park(self) -> ParkStream:
        self._parking_byte = self.replay.handed_out
        return ParkStream(self.generation, self.id)

    def answer_asleep(self) -> bool:
        """Obey commands of a parked stream that need no worker, because everything it was given has been heard.

        False if a worker must be woken. (What a container's bytes are in seconds, only a decoder knows.)
        """
        if self.clock.container or self.utterance_open or self.replay.received > self.replay.acknowledged:
            return False
        here = self.clock.sample_of(self.replay.received)
        for command in self.replay.take_commands():
            match command:
                case EndUtterance(token=token):
                    self.take(UtteranceEnded(0, self.id, token, -1))
                case ClearAudio():
                    self.take(AudioCleared(0, self.id, -1, here))
                case CloseStream():
                    self.take(StreamDone(0, self.id, here))
        return True

    def lost(self) -> None:
        """The worker that had the stream is gone."""
        self.generation = 0

    def take(self, event: StreamEvent) -> None:
        """What the worker says: remember what a resume needs, pass on what the dialect must know."""
        match event:
            case StreamProgress(received_bytes=received, needed_sample=needed):
                taken = self._base_byte + received
                self.replay.acknowledge(taken, self.clock.byte_of(needed))
                self._make_room()
                if not self.tells_progress:
                    return
                event = msgspec.structs.replace(event, received_bytes=taken)
            case Parked(needed_sample=needed):
                self.replay.acknowledge(self._parking_byte, self.clock.byte_of(needed))
                self.generation = 0
                return
            case SpeechStarted(utterance=number, sample=sample):
                self._utterances[number] = OpenUtterance(number, sample)
                self._next_utterance = max(self._next_utterance, number + 1)
            case SpeechStopped(utterance=number) if number in self._utterances:
                self._utterances[number] = msgspec.structs.replace(
                    self._utterances[number],
                    end_sample=event.sample,
                    through_sample=event.through_sample,
                    cause=event.cause,
                )
            case Partial(through_sample=through) if through > self._guessed_through:
                # Audio that kills is never passed, so a new worker that only comes as far as the last one shows nothing.
                self._guessed_through = through
                self.crashes = 0
            case UtteranceDelta(utterance=number, text=text) if number in self._utterances:
                known = self._utterances[number]
                self._utterances[number] = msgspec.structs.replace(known, emitted=known.emitted + text)
                self.crashes = 0
            case UtteranceFinal(utterance=number, through_sample=through):
                self._utterances.pop(number, None)
                self.crashes = 0
                if event.cause == "request":
                    self._requested = number
                self._forget(through)
            case UtteranceEnded(token=token):
                self.replay.answered(EndUtterance, token)
                # A worker that came after the end finds nothing open any more.
                event = msgspec.structs.replace(event, utterance=max(event.utterance, self._requested))
                self._requested = -1
            case AudioCleared(utterance=number, through_sample=through):
                self._utterances.pop(number, None)
                self.replay.answered(ClearAudio)
                self._cleared_through = max(self._cleared_through, through)
                self._forget(through)
            case StreamDone():
                self._end()
        self._put(event)

    def fail(self, error: NapscribeError) -> None:
        """End the stream with an error; events already there are still read."""
        if not self.ended:
            self.error = error
            self._end()

    # ------------------------------------------------------------ inside

    def _forget(self, through: int) -> None:
        """Audio that must not be heard again, even if the worker dies before its next word about progress; but for that of utterances
        which are owed a final."""
        oldest = min((known.start_sample for known in self._utterances.values()), default=through)
        self.replay.forget(self.clock.byte_of(min(through, oldest)))

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _command(self, command: StreamCommand) -> None:
        """Raises AudioOverrun if the commands that wait for their answer are more than anybody needs."""
        if self.replay.commands >= MAX_COMMANDS and not isinstance(command, CloseStream):
            raise AudioOverrun(f"{MAX_COMMANDS} commands wait to be obeyed.", hint="Wait for their answers.")
        self.replay.add_command(command, time.monotonic_ns())
        self._changed(self)

    def _put(self, event: StreamEvent) -> None:
        try:
            self._outbox.put(event)
        except SlowReader as error:
            self.fail(error)

    def _overfull(self) -> bool:
        if self.clock.container:
            return self.replay.received > MAX_CONTAINER_BYTES
        return self.replay.waiting_seconds > HELD_SECONDS

    async def _wait_for_room(self) -> None:
        if self.clock.container and self.replay.received > MAX_CONTAINER_BYTES:
            raise AudioOverrun(
                f"A stream in a container may have {MAX_CONTAINER_BYTES // 1024 // 1024} MiB.",
                hint="Open a new stream, or send headerless PCM, which has no such bound.",
            )
        self._room.clear()
        spare = max(1.0, HELD_SECONDS - self.replay.waiting_seconds)
        try:
            async with asyncio.timeout(spare):
                await self._room.wait()
        except TimeoutError:
            raise AudioOverrun(
                f"{self.replay.waiting_seconds:.0f} s of audio wait and the worker does not take them.",
                hint="Send no faster than real time, or try again when the server has less to do.",
            ) from None
        self._check()

    def _make_room(self) -> None:
        if self.replay.waiting_seconds <= BACKPRESSURE_SECONDS:
            self._room.set()

    def _end(self) -> None:
        self.ended = True
        self._room.set()
        self._outbox.news.set()
        self._changed(self)
