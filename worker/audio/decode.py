"""From a file to mono at 16 kHz, as a stream of blocks of one second: memory does not grow with the recording.

FFmpeg (inside PyAV's wheel) takes containers and codecs apart, soxr resamples, channels are averaged. Both bounds, decoded
seconds and decoded bytes, hold *while* decoding: 25 MB of Opus can be nine hours of sound.

An upload is hostile until proved otherwise. FFmpeg reads from a Python file object that has no name, only demuxers of a
fixed list may open it (no playlist, no concatenation script, no image sequence, no device), no protocol is allowed, and only
audio decoders may run while it probes the streams. So a file can never make us read another file or reach the network.

The samples of a file are the same in every run: the same frames pass the same resampler in the same pieces. That is what
makes ``base_sample`` exact.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import av
import numpy as np
import numpy.typing as npt
import soxr
from av.codec.codec import Codec, codecs_available

from shared.errors import AudioTooLong, EmptyAudio, UnsupportedAudio
from shared.messages import RawAudio
from shared.pcm import SAMPLE_RATE
from worker.audio.pcm import MAX_RATE, MIN_RATE, PcmDecoder, clean, mono
from worker.audio.samples import Audio

__all__ = ["AudioFile", "PcmDecoder", "decode_stream"]

BLOCK = SAMPLE_RATE
"""Samples of a block that an ``AudioFile`` yields; the last one is shorter."""

BYTES_PER_SECOND = 192_000 * 2 * 4
"""Decoded bytes allowed for each second allowed: stereo at 192 kHz as floats, or 7.1 at 48 kHz."""

MAX_DEMUX_ERRORS = 16
"""Errors of the demuxer without a packet between them, after which the rest of the file is given up."""

RAW_PIECE = 64 * 1024
"""Bytes of headerless PCM that are read at once."""

DEMUXERS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,dsf,dts,eac3,flac,flv,g722,gsm,iamf,loas,matroska,mov,mp3,mpc,mpc8,"
    "mpeg,mpegts,nistsphere,nut,ogg,oma,qcp,rm,sln,sox,tak,truehd,tta,voc,w64,wav,wv,wtv,xwma"
)
"""FFmpeg's demuxers that may open an upload: all of them find every byte inside the one file they are given."""

LIVE_PROBE = {"probesize": "2048", "analyzeduration": "0", "formatprobesize": "16384"}
"""FFmpeg would read seconds of a live stream before it gave the first of them, and a megabyte of one that it does not know
before it said so; here the header has to be enough."""

_HINT = (
    "Send a sound or video file such as wav, mp3, m4a, mp4, webm, ogg, flac or amr; "
    "headerless PCM needs its encoding, sample rate and channels declared."
)
_NO_SOUND = "Send a recording with sound in it."

_FORMATS = {"u8": "u1", "s16": "<i2", "s32": "<i4", "s64": "<i8", "flt": "<f4", "dbl": "<f8"}
_DTYPES = {name + planar: np.dtype(dtype) for name, dtype in _FORMATS.items() for planar in ("", "p")}
"""FFmpeg's sample formats; planar ones end in ``p``."""

av.logging.set_level(None)
av.logging.set_libav_level(av.logging.PANIC)

Channels = Sequence[npt.NDArray[Any]]
"""Of one length and type, as the decoder gave them."""

Pieces = Iterator[tuple[Channels, int]]
"""With their rate in Hz."""

MonoPieces = Iterator[tuple[Audio, int]]
"""With its rate in Hz."""


class Readable(Protocol):
    """What a live stream comes from; ``b""`` is its end."""

    def read(self, size: int, /) -> bytes: ...


class AudioFile:
    """A recording as an iterator of float32 blocks, shape ``(≤ 16000,)``, mono at 16 kHz. Use it in a ``with``, once.

    ``raw`` declares headerless PCM; otherwise the container says what is inside. ``max_seconds`` bounds the recording, 0 is no
    bound. Only samples from ``base_sample`` (16 kHz) on are yielded, bit-equal to those of a run that yielded them all.
    Lost or damaged packets are left out without filling the gap, and a file cut short gives what it has, as in players.
    Values above 1 stay; what is not a finite number becomes 0.

    Raises EmptyAudio (no sample inside), UnsupportedAudio (not audio, no audio stream, unknown codec, nothing of it can be
    decoded), AudioTooLong (a bound was reached), OSError (the file itself cannot be read).
    """

    def __init__(
        self, path: str | Path, *, raw: RawAudio | None = None, max_seconds: float = 0, base_sample: int = 0
    ) -> None:
        self._path = Path(path)
        self._raw = raw
        self._base = base_sample
        self._max_samples = round(max_seconds * SAMPLE_RATE)
        self._max_bytes = round(max_seconds * BYTES_PER_SECOND)
        self._exit = ExitStack()
        self._container: _Container | None = None
        self.samples = 0
        """Decoded so far, 16 kHz, from the start of the recording; its length when the iteration has ended."""
        self.decoded_bytes = 0
        """Size of what the decoder gave, before mixing and resampling."""

    @property
    def corrupt_packets(self) -> int:
        """Packets that were left out."""
        return self._container.corrupt if self._container else 0

    def __enter__(self) -> Self:
        with self._exit:
            source = self._exit.enter_context(self._path.open("rb", buffering=0))
            if not self._path.stat().st_size:
                raise EmptyAudio("The file is empty.", hint=_NO_SOUND)
            if self._raw:
                self._pieces = self._pcm(source, PcmDecoder(self._raw))
            else:
                self._container = self._exit.enter_context(_Container(source, self._spend))
                self._pieces = self._container.frames()
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.close()

    def __iter__(self) -> Iterator[Audio]:
        waiting: list[Audio] = []
        length = 0
        for audio in _resampled(_gathered(self._pieces)):
            waiting.append(self._after_base(audio))
            length += len(waiting[-1])
            if length >= BLOCK:
                joined = np.concatenate(waiting)
                whole = length - length % BLOCK
                yield from joined[:whole].reshape(-1, BLOCK)
                waiting = [joined[whole:]]
                length -= whole
        if length:
            yield np.concatenate(waiting)
        if not self.samples:
            if self.corrupt_packets:
                raise UnsupportedAudio("Nothing in the file could be decoded.", hint=_HINT)
            raise EmptyAudio("There is no sound in the file.", hint=_NO_SOUND)

    def _after_base(self, audio: Audio) -> Audio:
        before = self._base - self.samples
        self.samples += len(audio)
        if self._max_samples and self.samples > self._max_samples:
            raise _too_long(f"longer than {self._max_samples / SAMPLE_RATE:g} s")
        return audio[max(0, before) :]

    def _spend(self, size: int) -> None:
        self.decoded_bytes += size
        if self._max_bytes and self.decoded_bytes > self._max_bytes:
            raise _too_long(f"more than {self._max_bytes // 2**20} MiB when decoded")

    def _pcm(self, source: io.FileIO, decoder: PcmDecoder) -> Pieces:
        while data := source.read(RAW_PIECE):
            self._spend(len(data))
            yield [decoder.decode(data)], decoder.rate


def decode_stream(source: Readable) -> Iterator[Audio]:
    """A container that is still being written (webm, ogg, mp3, adts and the like), float32 mono at 16 kHz, as soon as each
    packet is complete. ``source.read`` blocks until bytes are there. Raises UnsupportedAudio."""
    with _Container(source, live=True) as container:
        yield from _resampled((_mixed([channels]), rate) for channels, rate in container.frames())


def _too_long(what: str) -> AudioTooLong:
    return AudioTooLong(f"The recording is {what}.", hint="Send it in shorter parts, or raise the server's limit.")


# ---------------------------------------------------------------- containers


class _Container:
    """An opened container, of which one audio stream is decoded. Raises UnsupportedAudio."""

    def __init__(
        self, source: Readable, spend: Callable[[int], None] = lambda size: None, *, live: bool = False
    ) -> None:
        self._spend = spend
        self.corrupt = 0
        try:
            self._input = _open(source, live)
        except av.FFmpegError as error:
            raise UnsupportedAudio("The file is not audio that can be read here.", hint=_HINT) from error
        try:
            self._stream = _choose(self._input)
        except UnsupportedAudio:
            self._input.close()
            raise
        for other in self._input.streams:
            if other is not self._stream and hasattr(other, "discard"):  # newer PyAV: not even read where possible
                other.discard = type(other.discard).all
        self._codec = self._stream.codec_context
        self._codec.thread_count = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._input.close()

    def frames(self) -> Pieces:
        """Decoded frames; damaged packets are counted and left out."""
        for packet in self._packets():
            try:
                frames = self._codec.decode(packet)
            except av.FFmpegError:
                self.corrupt += 1
                continue
            for frame in frames:
                self._spend(sum(plane.buffer_size for plane in frame.planes))
                yield _channels(frame), _checked_rate(frame.sample_rate)

    def _packets(self) -> Iterator[Any]:
        """Packets of the stream, and at last ``None``, which empties the decoder."""
        failures = 0
        while failures < MAX_DEMUX_ERRORS:
            try:
                for packet in self._input.demux(self._stream):
                    failures = 0
                    if packet.size:
                        yield packet
                break
            except av.FFmpegError:
                self.corrupt += 1
                failures += 1
        yield None


class _Unnamed:
    """What FFmpeg may do with the upload: read, and seek in a file. It has no name, so that nothing can be found beside it."""

    def __init__(self, source: Readable) -> None:
        self.read = source.read
        if isinstance(source, io.IOBase) and source.seekable():
            self.seek = source.seek
            self.tell = source.tell


def _open(source: Readable, live: bool) -> Any:
    return av.open(
        _Unnamed(source),
        "r",
        container_options={
            "format_whitelist": DEMUXERS,
            "protocol_whitelist": "none",
            "codec_whitelist": _audio_decoders(),
            **(LIVE_PROBE if live else {}),
        },
        metadata_errors="replace",
        buffer_size=4096 if live else 128 * 1024,
    )


@cache
def _audio_decoders() -> str:
    names = []
    for name in sorted(codecs_available):
        try:
            codec = Codec(name, "r")
        except ValueError:  # only an encoder has this name
            continue
        if codec.type == "audio":
            names.append(codec.name)
    return ",".join(names)


def _choose(container: Any) -> Any:
    """The stream that a player would play; another one where its codec is unknown."""
    streams = list(container.streams.audio)
    if not streams:
        raise UnsupportedAudio("The file has no audio track.", hint=_HINT)
    best = container.streams.best("audio")
    known = [stream for stream in (best, *streams) if stream is not None and stream.codec_context is not None]
    if not known:
        raise UnsupportedAudio("The codec of the audio track is unknown.", hint="Convert it to wav, mp3, m4a or ogg.")
    return known[0]


def _checked_rate(rate: int) -> int:
    if MIN_RATE <= rate <= MAX_RATE:
        return rate
    raise UnsupportedAudio(f"The file claims a sample rate of {rate} Hz.", hint=_HINT)


def _channels(frame: Any) -> Channels:
    """Of one decoded frame of any sample format, where they lie."""
    dtype = _DTYPES[frame.format.name]
    count: int = frame.samples
    if frame.format.is_planar:
        return [np.frombuffer(plane, dtype, count) for plane in frame.planes]
    channels: int = frame.layout.nb_channels
    packed = np.frombuffer(frame.planes[0], dtype, count * channels)
    return [packed[channel::channels] for channel in range(channels)]


# ---------------------------------------------------------------- resampling


def _gathered(pieces: Pieces) -> MonoPieces:
    """Neighbours of one kind as mono of a quarter of a second at least: a call of NumPy or of the resampler costs more than a
    frame's samples do, and it holds back the other threads."""
    waiting: list[Channels] = []
    length = now = 0
    for channels, rate in pieces:
        alike = waiting and rate == now and _kind(channels) == _kind(waiting[0])
        if waiting and (not alike or length >= now // 4):
            yield _mixed(waiting), now
            waiting, length = [], 0
        waiting.append(channels)
        length, now = length + len(channels[0]), rate
    if waiting:
        yield _mixed(waiting), now


def _kind(channels: Channels) -> tuple[int, np.dtype[Any]]:
    return len(channels), channels[0].dtype


def _mixed(pieces: Sequence[Channels]) -> Audio:
    """Pieces of one kind joined, as clean mono."""
    return clean(mono([np.concatenate(channel) for channel in zip(*pieces, strict=True)]))


def _resampled(pieces: MonoPieces) -> Iterator[Audio]:
    resampler = _Resampler()
    for audio, rate in pieces:
        # A packet may be as long as the file allows; resampled, it must still be small.
        for start in range(0, len(audio), rate):
            yield resampler.push(audio[start : start + rate], rate)
    yield resampler.flush()


class _Resampler:
    """Mono at any rate to 16 kHz. A rate that changes in mid-stream ends one soxr stream and begins another."""

    def __init__(self) -> None:
        self._rate = 0
        self._stream: soxr.ResampleStream | None = None

    def push(self, audio: Audio, rate: int) -> Audio:
        if rate == self._rate:
            return self._run(audio)
        tail = self.flush()
        self._rate = rate
        self._stream = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
        return np.concatenate((tail, self._run(audio)))

    def flush(self) -> Audio:
        """What the filter still holds."""
        nothing = np.zeros(0, np.float32)
        return nothing if self._stream is None else self._run(nothing, last=True)

    def _run(self, audio: Audio, *, last: bool = False) -> Audio:
        out: Audio = audio if self._stream is None else self._stream.resample_chunk(audio, last=last)
        return out
