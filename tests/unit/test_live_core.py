"""The core of live streams: nothing that was given is lost, skipped or said twice, however often a worker dies."""

from __future__ import annotations

import asyncio
import collections
import itertools
from random import Random

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.streams import live
from gateway.streams.live import LiveStream, PcmClock
from gateway.streams.replay import IN_FLIGHT_SECONDS, ReplayBuffer
from shared.errors import AudioOverrun, EngineFailed, NapscribeError, SlowReader
from shared.streams import (
    AudioCleared,
    ClearAudio,
    CloseStream,
    EndUtterance,
    OpenStream,
    OpenUtterance,
    Parked,
    Partial,
    SpeechStarted,
    SpeechStopped,
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

SPEECH = StreamOptions(RawAudio("s16le", 16_000, 1))
CONTAINER = StreamOptions(RawAudio("container", 0, 0))
RATES = st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 12_345])
ENCODINGS = st.sampled_from(["s16le", "f32le", "s32le", "mulaw", "alaw"])

# ---------------------------------------------------------------- bytes and samples


@settings(deadline=None)
@given(RATES, ENCODINGS, st.integers(1, 8), st.integers(0, 10**9))
def test_a_resume_starts_at_a_byte_and_a_sample_of_the_same_moment(
    rate: int, encoding: str, channels: int, sample: int
) -> None:
    clock = PcmClock(RawAudio(encoding, rate, channels))
    byte = clock.byte_of(sample)
    frame = round(clock.bytes_per_second / rate)
    assert byte % frame == 0
    start = clock.sample_of(byte)
    assert start * rate == byte // frame * 16_000, "not one moment: the resampler would go on beside the beat"
    assert start <= sample
    assert clock.byte_of(start) == byte
    assert sample - start < 16_000, "less than a second is heard again"


def test_a_container_is_only_entered_at_its_beginning() -> None:
    clock = PcmClock(CONTAINER.audio)
    assert clock.container
    assert (clock.byte_of(10**6), clock.sample_of(10**6)) == (0, 0)


# ---------------------------------------------------------------- what may have to be said again


def lost(_generation: int, _stream: str, _arrived_ns: int, _data: bytes) -> None:
    """A frame goes to a worker that never answers."""


class Replays(RuleBasedStateMachine):
    """A stream over many workers, each of which hears what it is sent in order and may die at any moment.

    The byte at position n of the stream is n modulo 251, so that every piece says where it belongs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate = 100
        self.buffer = ReplayBuffer(self.rate)
        self.given = 0
        self.commands: dict[int, int] = {}
        """Token to its place in the stream, for every command without an answer."""
        self.tokens = 0
        self.heard = 0
        """End of what the present worker has."""
        self.told: set[int] = set()
        """Commands that the present worker has."""

    @rule(size=st.integers(1, 400))
    def audio(self, size: int) -> None:
        data = bytes((self.given + i) % 251 for i in range(size))
        self.buffer.add_audio(data, now_ns=self.given)
        self.given += size

    @rule(size=st.integers(1, 60))
    def frame(self, size: int) -> None:
        """Audio that is sent at once, if nothing stands in its way."""
        data = bytes((self.given + i) % 251 for i in range(size))
        before = self.buffer.acknowledged
        if self.buffer.pass_on(data, now_ns=self.given):
            assert self.heard == self.given, "it has passed something"
            assert set(self.commands) == self.told, "it has passed a command"
            self.given += size
            assert self.given - before <= IN_FLIGHT_SECONDS * self.rate
            self.heard = self.given

    @rule()
    def command(self) -> None:
        self.tokens += 1
        self.commands[self.tokens] = self.given
        self.buffer.add_command(EndUtterance(0, "s", self.tokens), 0)

    @rule(count=st.integers(1, 6))
    def send(self, count: int) -> None:
        for _ in range(count):
            before = self.buffer.acknowledged
            entry = self.buffer.next()
            if entry is None:
                return
            if isinstance(entry.command, EndUtterance):
                token = entry.command.token
                assert token in self.commands, "an answered command was sent again"
                assert token not in self.told, "sent twice to one worker"
                assert self.heard >= min(self.commands[token], self.buffer.received), "it came before its audio"
                self.told.add(token)
                continue
            assert entry.offset == self.heard, "a gap, or a piece twice"
            assert entry.data == bytes((entry.offset + i) % 251 for i in range(len(entry.data)))
            assert entry.end - before <= IN_FLIGHT_SECONDS * self.rate
            self.heard = entry.end

    @precondition(lambda self: self.heard > self.buffer.needed)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        received = data.draw(st.integers(self.buffer.needed, self.heard + 10))
        needed = data.draw(st.integers(self.buffer.needed, min(received, self.heard)))
        self.buffer.acknowledge(received, needed)  # a claim to more than was sent is not believed

    @precondition(lambda self: self.told)
    @rule()
    def answer(self) -> None:
        token = min(self.told)
        self.told.remove(token)
        del self.commands[token]
        self.buffer.answered(EndUtterance, token)

    @rule()
    def die(self) -> None:
        start = self.buffer.rewind()
        assert start == self.buffer.needed <= self.heard
        self.heard = start
        self.told.clear()

    @invariant()
    def nothing_is_forgotten_or_kept_for_nothing(self) -> None:
        assert self.buffer.received == self.given
        assert self.buffer.commands == len(self.commands)
        assert self.buffer.needed <= self.buffer.acknowledged <= self.heard
        assert self.buffer.held_bytes == self.given - self.buffer.needed
        assert self.buffer.pending == (self.buffer.acknowledged < self.given or bool(self.commands))

    def teardown(self) -> None:
        """One more worker, which lives: it gets everything that is needed, to the last byte and command, although it says
        only every quarter of a second what it has."""
        self.die()
        while self.heard < self.given or self.told != set(self.commands):
            before = (self.heard, len(self.told))
            self.send(1)
            assert (self.heard, len(self.told)) != before, "it waits for ever"
            if self.heard - self.buffer.acknowledged >= 0.25 * self.rate:
                self.buffer.acknowledge(self.heard, self.buffer.needed)


Replays.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_replays = Replays.TestCase


def test_only_the_newest_unsent_options_are_kept() -> None:
    buffer = ReplayBuffer(100)
    for language in ("en", "de", "fr"):
        buffer.add_command(UpdateStream(0, "s", StreamOptions(SPEECH.audio, language)), 0)
    entry = buffer.next()
    assert entry is not None
    assert isinstance(entry.command, UpdateStream)
    assert entry.command.options.language == "fr"
    assert buffer.next() is None
    assert not buffer.pending


# ---------------------------------------------------------------- a stream over many generations


class Ears:
    """What a worker does to a stream, on bytes instead of sound: every 100th sample begins an utterance or ends one.

    It obeys flow control, answers commands, resumes what it is told was open, and dies when told to: at once, or after
    ``last_words`` more events, in the middle of what it has to say.
    """

    EVERY = 100
    PREROLL = 10
    TAIL = 3
    LATE = 250
    """A final is so many samples late: another utterance may have begun by then."""

    def __init__(self, stream: LiveStream, generation: int, heard: dict[int, bytes]) -> None:
        self.stream = stream
        self.generation = generation
        opening = stream.opening(generation)
        self.at = opening.base_sample
        ends = [known.end_sample for known in opening.resumed]
        self.floor = max([opening.base_sample, opening.floor_sample, *ends])
        self.received = 0
        self.heard = heard
        """Sample to its bytes, over all generations."""
        self.next = opening.next_utterance
        self.open = collections.deque(opening.resumed)
        """Utterances without a final; at most the last one has no end."""
        self.last_words: int | None = None
        self.closed = False
        self.check(opening)

    def check(self, opening: OpenStream) -> None:
        assert opening.generation == self.generation
        assert all(known.end_sample >= 0 for known in opening.resumed[:-1])
        for known in opening.resumed:
            assert known.utterance < self.next
            assert opening.base_sample <= known.start_sample, "its audio is lost"
            assert known.through_sample == (known.end_sample + self.TAIL if known.end_sample >= 0 else -1)
        for sample in range(opening.base_sample):
            assert sample in self.heard, "nobody has heard it, and it is not sent again"

    @property
    def dead(self) -> bool:
        return self.last_words == 0

    def step(self) -> bool:
        """Take one message; False if there is none."""
        message = None if self.closed or self.dead else self.stream.outgoing()
        if message is None:
            return False
        if message.command is None:
            self.hear(message.data)
            return True
        command = self.stream.addressed(message.command)
        assert command.generation == self.generation
        match command:
            case EndUtterance(token=token):
                number = self.speaking.utterance if self.speaking else -1
                self.end("request")
                self.settle(0)
                self.tell(UtteranceEnded(self.generation, "s", token, number))
            case ClearAudio():
                number = self.speaking.utterance if self.speaking else -1
                if self.speaking:
                    self.open.pop()
                self.floor = self.at
                self.tell(AudioCleared(self.generation, "s", number, self.at))
            case CloseStream():
                self.end("close")
                self.settle(0)
                self.closed = True
                self.tell(StreamDone(self.generation, "s", self.at))
        return True

    @property
    def speaking(self) -> OpenUtterance | None:
        known = self.open[-1] if self.open else None
        return known if known and known.end_sample < 0 and known.start_sample < self.at else None

    def hear(self, data: bytes) -> None:
        self.received += len(data)
        for position in range(0, len(data), 2):
            sample = data[position : position + 2]
            assert self.heard.get(self.at, sample) == sample, "other audio at the same place"
            self.heard[self.at] = sample
            self.at += 1
            self.settle(self.LATE)
            if self.at % self.EVERY == 0:
                self.turn()
        needed = self.open[0].start_sample if self.open else max(self.floor, self.at - self.PREROLL)
        self.tell(StreamProgress(self.generation, "s", self.received, needed))

    def turn(self) -> None:
        if self.speaking:
            self.end("silence")
        elif self.at > self.floor and not (self.open and self.open[-1].end_sample < 0):
            start = max(self.floor, self.at - self.PREROLL)
            self.tell(SpeechStarted(self.generation, "s", self.next, start))
            self.open.append(OpenUtterance(self.next, start))
            self.next += 1

    def end(self, cause: str) -> None:
        if self.speaking is None:
            return
        known, through = self.open.pop(), self.at + self.TAIL
        self.floor = self.at
        self.tell(SpeechStopped(self.generation, "s", known.utterance, self.at, through, cause))
        ended = msgspec.structs.replace(known, end_sample=self.at, through_sample=through, cause=cause)
        self.open.append(ended)

    def settle(self, late: int) -> None:
        """Finals of what ended so many samples ago."""
        while self.open and 0 <= self.open[0].end_sample <= self.at - late:
            self.final(self.open.popleft())

    def final(self, known: OpenUtterance) -> None:
        number, start, end, whole = known.utterance, known.start_sample, known.end_sample, f"u{known.start_sample}"
        if known.emitted != whole:
            self.tell(UtteranceDelta(self.generation, "s", number, end, whole[len(known.emitted) :]))
        self.tell(UtteranceFinal(self.generation, "s", number, start, end, end, whole, cause=known.cause))

    def tell(self, event: StreamEvent) -> None:
        if self.last_words is not None:
            if self.last_words == 0:
                return
            self.last_words -= 1
        self.stream.take(event)


HAPPENINGS = st.sampled_from(["audio", "audio", "audio", "step", "step", "end", "clear", "die", "gone", "last words"])


@settings(max_examples=400, deadline=None)
@example(
    ["audio"] * 9 + ["clear", "step", "die"] + ["audio", "step"] * 6, Random(0)
)  # a final is owed, what follows is cleared
@given(st.lists(HAPPENINGS, min_size=20, max_size=80), st.randoms(use_true_random=False))
async def test_deaths_are_invisible(happenings: list[str], random: Random) -> None:
    """Every sample is heard, every utterance is said once and whole, every command answered once."""
    stream = LiveStream(
        "s", SPEECH, lambda _: None, lambda *sent: ears.hear(sent[-1]) if ears and not ears.dead else None
    )
    heard: dict[int, bytes] = {}
    generation, given_samples, ends, clears = 1, 0, 0, 0
    ears: Ears | None = Ears(stream, 1, heard)
    for happening in happenings:
        match happening:
            case "audio":
                samples = range(given_samples, given_samples + 37)
                data = b"".join(sample.to_bytes(2, "little") for sample in samples)
                if not stream.take_at_once(data):
                    await stream.send(data)
                given_samples += 37
            case "end":
                ends += 1
                assert stream.end_utterance() == ends
            case "clear":
                clears += 1
                stream.clear()
            case "step" if ears is not None:
                ears.step()
            case "last words" if ears is not None and ears.last_words is None:
                ears.last_words = random.randrange(1, 4)
            case "die" | "gone":
                stream.lost()
                generation += 1
                ears = Ears(stream, generation, heard) if happening == "die" else None
    stream.finish()
    stream.lost()
    ears = Ears(stream, generation + 1, heard)
    while ears.step():
        pass
    events = [event async for event in stream.events()]
    assert isinstance(events[-1], StreamDone)
    assert events[-1].through_sample == given_samples
    assert set(heard) == set(range(given_samples))
    check_story(events, ends, clears)


def check_story(events: list[StreamEvent], ends: int, clears: int) -> None:
    started = [event.utterance for event in events if isinstance(event, SpeechStarted)]
    assert started == list(range(len(started))), "an utterance began twice, or a number is missing"
    finals = [event for event in events if isinstance(event, UtteranceFinal)]
    assert len({final.utterance for final in finals}) == len(finals)
    cleared = {event.utterance for event in events if isinstance(event, AudioCleared)} - {-1}
    assert {final.utterance for final in finals} == set(started) - cleared, "speech that has begun came to no end"
    stopped = [(event.utterance, event.cause) for event in events if isinstance(event, SpeechStopped)]
    assert stopped == [(final.utterance, final.cause) for final in finals]
    spans = [(final.start_sample, final.end_sample) for final in finals]
    assert all(start < end for start, end in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), spans
    places = [event.through_sample for event in events if isinstance(event, AudioCleared)]
    assert not any(start < place < end for start, end in spans for place in places), "cleared speech came back"
    starts = [final.start_sample for final in finals]
    assert starts == sorted(set(starts)), "the same speech came twice"
    for final in finals:
        deltas = [e.text for e in events if isinstance(e, UtteranceDelta) and e.utterance == final.utterance]
        assert "".join(deltas) == final.text
    answers = [event for event in events if isinstance(event, UtteranceEnded)]
    assert [event.token for event in answers] == list(range(1, ends + 1))
    asked = [final.utterance for final in finals if final.cause == "request"]
    assert [event.utterance for event in answers if event.utterance >= 0] == asked
    assert sum(isinstance(event, AudioCleared) for event in events) == clears


# ---------------------------------------------------------------- asleep


async def parked(seconds: float = 1.0) -> LiveStream:
    """A stream that has heard so much silence and was let go of by its worker."""
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.opening(1)
    await stream.send(bytes(round(seconds * 32_000)))
    while stream.outgoing() is not None:
        pass
    stream.park()
    stream.take(Parked(1, "s", round(seconds * 16_000) - 5_000))
    assert stream.generation == 0
    return stream


async def test_a_parked_stream_has_nothing_pending() -> None:
    stream = await parked()
    assert not stream.replay.pending
    assert stream.replay.held_bytes == 10_000


async def test_commands_of_a_parked_stream_need_no_worker() -> None:
    stream = await parked()
    stream.end_utterance()
    stream.clear()
    stream.finish()
    assert stream.answer_asleep()
    events = [event async for event in stream.events()]
    assert events == [
        UtteranceEnded(0, "s", 1, -1),
        AudioCleared(0, "s", -1, 16_000),
        StreamDone(0, "s", 16_000),
    ]


async def test_new_audio_needs_one() -> None:
    stream = await parked()
    await stream.send(b"\1\0")
    stream.finish()
    assert not stream.answer_asleep()
    opening = stream.opening(2)
    assert opening.base_sample == 11_000, "with the audio before it that a word may have begun in"
    messages = []
    while (message := stream.outgoing()) is not None:
        messages.append(message)
    assert b"".join(entry.data for entry in messages) == bytes(10_000) + b"\1\0"
    assert isinstance(messages[-1].command, CloseStream)


async def test_a_container_needs_one_to_know_its_length() -> None:
    stream = LiveStream("s", CONTAINER, lambda _: None, lost)
    stream.finish()
    assert not stream.answer_asleep()


# ---------------------------------------------------------------- bounds


async def read_until_error(stream: LiveStream) -> tuple[list[StreamEvent], NapscribeError | None]:
    """Everything that can be read, and how it ended."""
    read: list[StreamEvent] = []
    try:
        async for event in stream.events():
            read.append(event)  # noqa: PERF401 - a comprehension would lose them with the error
    except NapscribeError as error:
        return read, error
    return read, None


async def test_a_client_faster_than_the_worker_is_slowed() -> None:
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.opening(1)
    second = bytes(32_000)
    for _ in range(10):
        await asyncio.wait_for(stream.send(second), 1)
    waiting = asyncio.ensure_future(stream.send(second))
    await asyncio.sleep(0)
    assert not waiting.done()
    while stream.outgoing() is not None:
        pass
    stream.take(StreamProgress(1, "s", 64_000, 0))
    await asyncio.wait_for(waiting, 1)


async def test_a_client_that_never_stops_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HELD_SECONDS", 0.02)
    monkeypatch.setattr(live, "BACKPRESSURE_SECONDS", 0.01)
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    with pytest.raises(AudioOverrun, match="the worker does not take them"):
        await stream.send(bytes(320_000))


async def test_a_container_is_kept_whole_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_CONTAINER_BYTES", 100)
    stream = LiveStream("s", CONTAINER, lambda _: None, lost)
    await stream.send(bytes(100))
    with pytest.raises(AudioOverrun, match="container"):
        await stream.send(b"x")


async def test_a_reader_that_does_not_read_loses_partials_first_and_then_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_EVENTS", 10)
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.take(SpeechStarted(1, "s", 0, 0))
    for number in range(100):
        stream.take(Partial(1, "s", 0, number, f"text {number}"))
        stream.take(StreamProgress(1, "s", number, 0))
    too_early = stream.ended
    assert not too_early
    for number in range(10):
        stream.take(UtteranceDelta(1, "s", 0, number, "word "))
    assert stream.ended
    read, error = await read_until_error(stream)
    assert isinstance(error, SlowReader)
    partials = [event for event in read if isinstance(event, Partial)]
    assert [partial.text for partial in partials] == ["text 99"]
    assert sum(isinstance(event, StreamProgress) for event in read) == 1


async def test_a_guess_that_reaches_further_than_ever_clears_a_call_and_no_other_does() -> None:
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.take(SpeechStarted(1, "s", 0, 0))
    for through, cleared in ((8_000, True), (8_000, False), (7_000, False), (8_001, True)):
        stream.crashes = 2
        stream.take(Partial(1, "s", 0, through, "words"))
        assert stream.crashes == (0 if cleared else 2), through


async def test_an_error_comes_after_what_was_said_before_it() -> None:
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.take(SpeechStarted(1, "s", 0, 0))
    stream.fail(EngineFailed("broken"))
    read, error = await read_until_error(stream)
    assert isinstance(error, EngineFailed)
    assert len(read) == 1
    with pytest.raises(EngineFailed):
        await stream.send(b"\0\0")


@settings(deadline=None)
@given(RATES, ENCODINGS)
async def test_another_encoding_before_the_first_byte_only(rate: int, encoding: str) -> None:
    assume((rate, encoding) != (16_000, "s16le"))
    other = StreamOptions(RawAudio(encoding, rate, 1), "de")
    stream = LiveStream("s", SPEECH, lambda _: None, lost)
    stream.end_utterance()
    stream.update(other)
    assert stream.options == other
    assert stream.replay.commands == 2, "a command that waits is not lost with the encoding"
    await stream.send(b"\0\0\0\0")
    stream.update(SPEECH)
    assert stream.options == StreamOptions(other.audio)


# ---------------------------------------------------------------- the short way of a frame


async def test_frames_go_at_once_only_where_nothing_is_in_their_way() -> None:
    """A frame neither wakes a worker nor passes what waits, and no more than the window is on its way."""
    sent: list[bytes] = []
    stream = LiveStream("s", SPEECH, lambda _: None, lambda *frame: sent.append(frame[-1]))
    frame = bytes(640)
    assert not stream.take_at_once(frame), "nobody is there to take it"
    stream.opening(1)
    assert not stream.take_at_once(b"")
    assert not stream.take_at_once(bytes(32_000)), "it is to be cut"
    while stream.take_at_once(frame):
        assert len(sent) <= 100, "more than two seconds are on their way"
    assert sent == [frame] * 100
    stream.take(StreamProgress(1, "s", 64_000, 0))
    stream.end_utterance()
    assert not stream.take_at_once(frame), "the command goes first"
    entry = stream.outgoing()
    assert entry is not None
    assert entry.command is not None
    assert stream.take_at_once(frame)
    stream.lost()
    stream.opening(2)
    assert not stream.take_at_once(frame), "what the worker that died had goes first"
    stream.fail(EngineFailed("It is over."))
    assert not stream.take_at_once(frame)
