"""Messages of live streams. ``request_id`` names the stream; positions are samples of the stream at 16 kHz.

All of a stream's commands travel on the data socket, in order with its audio.
"""

from __future__ import annotations

import msgspec

from shared.wire import Message, RawAudio, Word

# ---------------------------------------------------------------- commands


class Endpointing(msgspec.Struct, frozen=True, array_like=True):
    """Where an utterance begins and ends."""

    automatic: bool = True
    """By voice activity; False: only ``EndUtterance`` ends one."""
    threshold: float = 0.5
    """Probability of speech above which it begins."""
    prefix_ms: int = 300
    """Audio kept from before the first speech."""
    silence_ms: int = 500
    """Silence that ends an utterance."""


class StreamOptions(msgspec.Struct, frozen=True, array_like=True):
    """What the caller asked of a stream; may be replaced between utterances."""

    audio: RawAudio
    """``container`` as encoding: the bytes are a container (webm, ogg) that says itself what is inside."""
    language: str = ""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    words: bool = False
    partials: bool = True
    endpointing: Endpointing = Endpointing()
    logprobs: bool = False
    only_certain: bool = False
    """Nobody is shown partials: an engine listens to an open utterance only if what it is certain of stays. Others, whose
    final may be another text, hear it once, in the end."""


class OpenUtterance(msgspec.Struct, frozen=True, array_like=True):
    """An utterance that had begun when its worker died: it goes on, unannounced."""

    utterance: int
    start_sample: int
    emitted: str = ""
    """Deltas that have been handed out."""
    end_sample: int = -1
    """Where it ended, if that has been announced."""
    through_sample: int = -1
    """And up to where its audio was heard, the soft end of its last word included: what follows is the next one's."""
    cause: str = "silence"
    """And why."""


class OpenStream(Message, frozen=True, tag="open_stream"):
    """Take a stream. The sender holds a live credit; it comes back with ``StreamDone``, ``Parked`` or ``Failed``."""

    request_id: str
    options: StreamOptions
    base_sample: int = 0
    """Position of the first sample that will be sent."""
    next_utterance: int = 0
    resumed: tuple[OpenUtterance, ...] = ()
    """In order; at most the last one has no end."""
    floor_sample: int = 0
    """What lies before belongs to them, or has been cleared."""


class StreamAudio(Message, frozen=True, tag="audio"):
    """The payload is audio as it was received; the first byte follows the last one of the message before."""

    request_id: str
    arrived_ns: int
    """When the gateway received its last byte."""


class AudioBatch(Message, frozen=True, tag="audio_batch"):
    """Audio of several streams in one message: what came within a few milliseconds. Sending costs the same for one frame
    as for fifty, so a gateway with many calls sends many at a time."""

    frames: tuple[tuple[str, int, int], ...]
    """(stream, when it came in ns, its bytes in the payload), in order."""


class UpdateStream(Message, frozen=True, tag="update_stream"):
    """Other options from here on; an open utterance keeps those it began with, endpointing apart."""

    request_id: str
    options: StreamOptions


class EndUtterance(Message, frozen=True, tag="end_utterance"):
    """Finish now what has been said up to here. Answered by ``UtteranceEnded`` after the finals of everything before it."""

    request_id: str
    token: int


class ClearAudio(Message, frozen=True, tag="clear_audio"):
    """Drop what has been received and belongs to no finished utterance, an open utterance included."""

    request_id: str


class ParkStream(Message, frozen=True, tag="park_stream"):
    """Let go of a stream that is silent. Answered by ``Parked``, or by nothing if an utterance is open."""

    request_id: str


class CloseStream(Message, frozen=True, tag="close_stream"):
    """No more audio. The open utterance ends here; ``StreamDone`` follows the last final."""

    request_id: str


StreamCommand = (
    OpenStream | StreamAudio | AudioBatch | UpdateStream | EndUtterance | ClearAudio | ParkStream | CloseStream
)

# ---------------------------------------------------------------- events


class StreamProgress(Message, frozen=True, tag="stream_progress"):
    """How far a stream is. Sent as audio comes in, at least once a second of it, silence included."""

    request_id: str
    received_bytes: int
    """Since ``OpenStream``: what is acknowledged; the sender keeps a bounded amount beyond it in flight."""
    needed_sample: int
    """The oldest sample that this stream still needs, pre-roll included; earlier audio may be forgotten."""


class SpeechStarted(Message, frozen=True, tag="speech_started"):
    request_id: str
    utterance: int
    sample: int
    """Where the utterance's audio begins, pre-roll included."""


class SpeechStopped(Message, frozen=True, tag="speech_stopped"):
    request_id: str
    utterance: int
    sample: int
    through_sample: int = -1
    """Up to where its audio is heard, a little after its end."""
    cause: str = "silence"
    """Why: ``silence``, ``stall`` (no audio came any more), ``length``, ``request`` or ``close``."""


class Partial(Message, frozen=True, tag="partial"):
    """What the engine would say now of an open utterance; replaces the partial before."""

    request_id: str
    utterance: int
    through_sample: int
    text: str


class UtteranceDelta(Message, frozen=True, tag="utterance_delta"):
    """Words that are certain. Append-only."""

    request_id: str
    utterance: int
    through_sample: int
    text: str


class UtteranceTimings(msgspec.Struct, frozen=True, array_like=True):
    """Where the time between the last sound of speech and the final went. Nanoseconds."""

    speech_end_ns: int = 0
    """CLOCK_MONOTONIC time at which the gateway received the frame with the last speech sample."""
    endpoint_ns: int = 0
    """Until the silence was long enough: the caller's own setting."""
    buffered_ns: int = 0
    """Age, when the end was decided, of the frame that decided it: audio that waited for a worker, or for its turn there."""
    queue_ns: int = 0
    """From the end of the utterance to the first step that worked on it."""
    vad_ns: int = 0
    engine_ns: int = 0
    """Of the steps after the end of the utterance."""
    encode_ns: int = 0
    """This and the next two, from engines that know them: of the passes that the last audio took. They may have been over
    before the end was certain, and are no part of ``engine_ns`` then."""
    prefill_ns: int = 0
    decode_ns: int = 0
    windows: int = 0
    """Windows that the encoder has computed for this utterance, all updates together."""
    windows_listening: int = 0
    """The same of the smaller model that listened before, where there are two."""


class UtteranceFinal(Message, frozen=True, tag="utterance_final"):
    """The whole text of an utterance. Deltas, where the engine keeps a prefix, are its beginning."""

    request_id: str
    utterance: int
    start_sample: int
    end_sample: int
    """Where speech ended."""
    through_sample: int
    """Everything before is dealt with: the next generation goes on here."""
    text: str
    words: tuple[Word, ...] = ()
    estimated: bool = False
    """The words' times are spread over the speech that was found, not heard."""
    language: str = ""
    avg_logprob: float | None = None
    finish_reason: str = "stop"
    """``stop``, or why the engine ended before the sound did: ``repetition`` or ``length``."""
    cause: str = "silence"
    """As in ``SpeechStopped``."""
    revised: float = 0.0
    """Share of the words shown in partials that the final has otherwise, 0 to 1."""
    timings: UtteranceTimings = UtteranceTimings()
    logprobs: tuple[tuple[str, float], ...] = ()
    """Tokens and their log probabilities, where they were asked for and the engine has them."""


class UtteranceEnded(Message, frozen=True, tag="utterance_ended"):
    """``EndUtterance`` is done; ``utterance`` is the one that it ended, -1 if there was none."""

    request_id: str
    token: int
    utterance: int


class AudioCleared(Message, frozen=True, tag="audio_cleared"):
    """``ClearAudio`` is done; an utterance that was open is gone without a final."""

    request_id: str
    utterance: int
    """-1 if none was open."""
    through_sample: int


class Parked(Message, frozen=True, tag="parked"):
    """The stream is let go of and its credit is back; it goes on with an ``OpenStream`` at ``needed_sample``."""

    request_id: str
    needed_sample: int


class StreamDone(Message, frozen=True, tag="stream_done"):
    request_id: str
    through_sample: int
    """Length of the stream."""


StreamEvent = (
    StreamProgress
    | SpeechStarted
    | SpeechStopped
    | Partial
    | UtteranceDelta
    | UtteranceFinal
    | UtteranceEnded
    | AudioCleared
    | Parked
    | StreamDone
)
