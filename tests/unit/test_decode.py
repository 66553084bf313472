"""From files of every kind to the same sound; bounds, hostile files, damage, and exact resumption."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shared.errors import AudioTooLong, BadRequest, EmptyAudio, NapscribeError, UnsupportedAudio
from shared.messages import RawAudio
from tests.speech import DATA, RATE, Audio, clip, encode, resample, silence, wav
from worker.audio import decode, pcm
from worker.audio.decode import AudioFile, decode_stream

SENTENCE = "librivox-0880"

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(data: bytes) -> Path:
        path = tmp_path / "upload"
        path.write_bytes(data)
        return path

    return to_file


def decoded(path: Path, **options: Any) -> Audio:
    with AudioFile(path, **options) as file:
        return np.concatenate([np.zeros(0, np.float32), *file])


def loudness(audio: Audio) -> Audio:
    """Level of 20 ms frames in dB, down to -50 dB."""
    frames = audio[: len(audio) // 320 * 320].reshape(-1, 320)
    level: Audio = 20 * np.log10(np.sqrt((frames**2).mean(axis=1)) + 10**-2.5)
    return level


def likeness(audio: Audio, original: Audio) -> float:
    """Correlation of the loudness over time, at the best shift of up to 100 ms: what any codec for speech keeps."""
    return max(
        float(np.corrcoef(loudness(audio[shift:])[:count], loudness(original)[:count])[0, 1])
        for shift in range(0, 1600, 40)
        for count in [min(len(audio) - shift, len(original)) // 320]
    )


# ---------------------------------------------------------------- formats

LOSSLESS: dict[str, dict[str, Any]] = {
    "wav 16 bit": {"container": "wav", "codec": "pcm_s16le"},
    "wav 24 bit": {"container": "wav", "codec": "pcm_s24le"},
    "wav 32 bit": {"container": "wav", "codec": "pcm_s32le"},
    "wav 64 bit": {"container": "wav", "codec": "pcm_s64le"},
    "wav float": {"container": "wav", "codec": "pcm_f32le"},
    "wav double, stereo": {"container": "wav", "codec": "pcm_f64le", "channels": 2},
    "wav to a pipe": {"container": "wav", "codec": "pcm_s16le", "seekable": False},
    "w64": {"container": "w64", "codec": "pcm_s16le"},
    "aiff": {"container": "aiff", "codec": "pcm_s16be"},
    "caf": {"container": "caf", "codec": "pcm_s16be"},
    "flac": {"container": "flac", "codec": "flac"},
    "flac in ogg": {"container": "ogg", "codec": "flac"},
    "alac in m4a": {"container": "ipod", "codec": "alac"},
    "5.1 in mov behind video": {"container": "mov", "codec": "pcm_s16be", "channels": 6, "picture": True},
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats_give_every_sample(write: Write, name: str) -> None:
    original = clip(SENTENCE)
    audio = decoded(write(encode(original, **LOSSLESS[name])))
    assert len(audio) == len(original)
    assert np.abs(audio - original).max() < 1 / 32768


LOSSY: dict[str, tuple[float, dict[str, Any]]] = {
    "wav 8 bit": (0.9, {"container": "wav", "codec": "pcm_u8", "rate": 22_050}),
    "wav mu-law": (0.98, {"container": "wav", "codec": "pcm_mulaw", "rate": 8_000}),
    "wav A-law": (0.98, {"container": "wav", "codec": "pcm_alaw", "rate": 8_000}),
    "wav 44.1 kHz, stereo": (0.999, {"container": "wav", "codec": "pcm_s16le", "rate": 44_100, "channels": 2}),
    "wav adpcm": (0.98, {"container": "wav", "codec": "adpcm_ima_wav", "rate": 22_050}),
    "mp3, 64 kbit, stereo": (
        0.98,
        {"container": "mp3", "codec": "libmp3lame", "rate": 44_100, "channels": 2, "bit_rate": 64_000},
    ),
    "m4a": (0.98, {"container": "ipod", "codec": "aac", "rate": 44_100, "bit_rate": 64_000}),
    "mp4 with video, moov at the end": (
        0.98,
        {"container": "mp4", "codec": "aac", "rate": 48_000, "channels": 2, "picture": True},
    ),
    "mp4 in fragments": (
        0.98,
        {
            "container": "mp4",
            "codec": "aac",
            "rate": 48_000,
            "seekable": False,
            "options": {"movflags": "frag_keyframe+empty_moov"},
        },
    ),
    "webm without duration": (0.95, {"container": "webm", "codec": "libopus", "rate": 48_000, "seekable": False}),
    "opus in ogg": (0.95, {"container": "ogg", "codec": "libopus", "rate": 48_000}),
    "mkv with video": (0.98, {"container": "matroska", "codec": "aac", "rate": 48_000, "picture": True}),
    "avi": (0.98, {"container": "avi", "codec": "mp3", "picture": True}),
    "mpeg transport stream": (0.98, {"container": "mpegts", "codec": "aac", "picture": True}),
    "wma": (0.7, {"container": "asf", "codec": "wmav2", "bit_rate": 32_000}),
    "aac": (0.98, {"container": "adts", "codec": "aac"}),
    "amr": (0.85, {"container": "amr", "codec": "libopencore_amrnb", "rate": 8_000, "bit_rate": 12_200}),
    "3gp": (0.85, {"container": "3gp", "codec": "libopencore_amrnb", "rate": 8_000, "bit_rate": 12_200}),
    "ac3, 5.1": (0.98, {"container": "ac3", "codec": "ac3", "rate": 48_000, "channels": 6}),
    "au": (0.98, {"container": "au", "codec": "pcm_mulaw", "rate": 8_000}),
}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_formats_sound_like_the_original(write: Write, name: str) -> None:
    alike, options = LOSSY[name]
    original = clip(SENTENCE)
    audio = decoded(write(encode(original, **options)))
    assert -400 < len(audio) - len(original) < 1700  # encoders pad, and some containers cannot say so
    assert likeness(audio, original) > alike


@pytest.mark.parametrize("suffix", ["mp3", "m4a", "webm"])
def test_stored_files(suffix: str) -> None:
    """Written once and kept, so that a change of our own encoder cannot hide a change of the decoder."""
    original = clip(SENTENCE)
    audio = decoded(DATA / f"{SENTENCE}.{suffix}")
    assert abs(len(audio) - len(original)) < 400
    assert likeness(audio, original) > 0.95


def test_blocks_are_a_second_long() -> None:
    with AudioFile(DATA / "jfk.wav") as file:
        blocks = list(file)
    assert {block.shape for block in blocks[:-1]} == {(RATE,)}
    assert all(block.dtype == np.float32 for block in blocks)
    assert np.array_equal(np.concatenate(blocks), clip("jfk"))
    assert file.samples == len(clip("jfk"))


def test_first_of_two_audio_tracks_is_heard(write: Write) -> None:
    speech, other = clip(SENTENCE), clip("jfk")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        streams: list[Any] = [output.add_stream("pcm_s16le", rate=RATE, layout="mono") for _ in range(2)]
        for stream, audio in zip(streams, (speech, other), strict=True):
            frame = av.AudioFrame.from_ndarray(audio[None], "fltp", "mono")
            frame.sample_rate = RATE
            output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
    assert likeness(decoded(write(buffer.getvalue())), speech) > 0.999


def test_channels_are_averaged(write: Write) -> None:
    speech = clip(SENTENCE)
    both = np.stack([speech, np.zeros_like(speech)], axis=1)
    data = (both * 32768).astype("<i2").tobytes()
    audio = decoded(write(data), raw=RawAudio("s16le", RATE, 2))
    assert np.abs(audio - speech / 2).max() < 1e-6


def test_metadata_in_another_character_set(write: Write) -> None:
    title = b"TIT2" + struct.pack(">I", 5) + b"\0\0" + b"\x03\xff\xfe\xe4\xf6"
    tag = b"ID3\x04\0\0" + struct.pack(">I", len(title)) + title
    data = tag + (DATA / f"{SENTENCE}.mp3").read_bytes()
    assert likeness(decoded(write(data)), clip(SENTENCE)) > 0.98


# ---------------------------------------------------------------- headerless

RAW: dict[str, tuple[float, int, Callable[[Audio], bytes]]] = {
    "s16le": (1.5 / 32768, RATE, lambda audio: (audio * 32768).round().clip(-32768, 32767).astype("<i2").tobytes()),
    "f32le": (1e-6, RATE, lambda audio: audio.astype("<f4").tobytes()),
    "mulaw": (0.02, RATE, lambda audio: encode(audio, "mulaw", "pcm_mulaw")),
    "alaw": (0.02, RATE, lambda audio: encode(audio, "alaw", "pcm_alaw")),
}


@pytest.mark.parametrize("encoding", RAW)
def test_headerless(write: Write, encoding: str) -> None:
    tolerance, rate, encoder = RAW[encoding]
    original = clip(SENTENCE)
    audio = decoded(write(encoder(original)), raw=RawAudio(encoding, rate))
    assert len(audio) == len(original)
    assert np.abs(audio - original).max() < tolerance


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_headerless_at_other_rates(write: Write, rate: int) -> None:
    original = clip(SENTENCE)
    data = (resample(original, rate) * 32767).astype("<i2").tobytes()
    audio = decoded(write(data), raw=RawAudio("s16le", rate))
    assert abs(len(audio) - len(original)) <= 2
    assert likeness(audio, original) > 0.98


def test_odd_bytes_at_the_end_are_dropped(write: Write) -> None:
    data = np.arange(1000, dtype="<i2").tobytes()
    assert len(decoded(write(data + b"\x07"), raw=RawAudio("s16le", RATE))) == 1000


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (RawAudio("s24le", RATE), UnsupportedAudio),
        (RawAudio("s16le", 0), BadRequest),
        (RawAudio("s16le", 10**9), BadRequest),
        (RawAudio("s16le", RATE, 0), BadRequest),
        (RawAudio("s16le", RATE, 10**6), BadRequest),
    ],
)
def test_impossible_declarations(write: Write, raw: RawAudio, error: type[NapscribeError]) -> None:
    with pytest.raises(error) as caught, AudioFile(write(bytes(100)), raw=raw):
        pass
    assert caught.value.hint


# ---------------------------------------------------------------- numbers


def test_what_is_no_number_becomes_silence(write: Write) -> None:
    samples = clip(SENTENCE).copy()
    samples[1000:1010] = np.nan
    samples[2000], samples[3000], samples[4000] = np.inf, -np.inf, 3e38
    for rate in (RATE, 48_000):
        audio = decoded(write(samples.astype("<f4").tobytes()), raw=RawAudio("f32le", rate))
        assert np.isfinite(audio).all()
    path = write(_float_wav(samples))
    audio = decoded(path)
    assert not audio[1000:1010].any()
    assert not audio[[2000, 3000]].any()
    assert np.array_equal(audio[5000:], samples[5000:])


def _float_wav(samples: Audio) -> bytes:
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, RATE, RATE * 4, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_values_above_one_stay(write: Write) -> None:
    loud = clip(SENTENCE) * 20
    assert loud.max() > 2
    assert np.array_equal(decoded(write(_float_wav(loud))), loud)


# ---------------------------------------------------------------- resumption


@pytest.mark.parametrize("position", [0, 1, 15_999, 16_000, 23_457, 40_000])
@pytest.mark.parametrize("suffix", ["mp3", "m4a", "webm"])
def test_a_later_start_gives_the_same_samples(suffix: str, position: int) -> None:
    path = DATA / f"{SENTENCE}.{suffix}"
    whole = decoded(path)
    assert np.array_equal(decoded(path, base_sample=position), whole[position:])


def test_a_start_behind_the_end_gives_nothing() -> None:
    with AudioFile(DATA / "jfk.wav", base_sample=10**9) as file:
        assert list(file) == []
    assert file.samples == len(clip("jfk"))


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("suffix", ["mp3", "m4a", "webm", "wav"])
def test_too_long_is_found_while_decoding(write: Write, suffix: str) -> None:
    with AudioFile(DATA / f"{SENTENCE}.{suffix}", max_seconds=1.0) as file, pytest.raises(AudioTooLong) as caught:
        list(file)
    assert file.samples < 1.5 * RATE
    assert caught.value.hint


def test_a_bound_that_is_just_met() -> None:
    seconds = len(clip("jfk")) / RATE
    assert len(decoded(DATA / "jfk.wav", max_seconds=seconds)) == len(clip("jfk"))
    with pytest.raises(AudioTooLong):
        decoded(DATA / "jfk.wav", max_seconds=seconds - 0.001)


def test_decoded_bytes_are_bounded(write: Write) -> None:
    """Short enough, but as six channels of doubles at 96 kHz."""
    data = encode(silence(3), "wav", "pcm_f64le", channels=6, rate=96_000)
    path = write(data)
    with AudioFile(path, max_seconds=4) as file, pytest.raises(AudioTooLong, match="MiB"):
        list(file)
    assert file.decoded_bytes < len(data) / 2
    assert len(decoded(path, max_seconds=20)) == 3 * RATE


def test_an_absurd_rate_is_refused(write: Write) -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1)
        file.writeframes(bytes(100_000))
    with pytest.raises(UnsupportedAudio, match="1 Hz"):
        decoded(write(buffer.getvalue()))


# ---------------------------------------------------------------- not audio


@pytest.mark.parametrize("raw", [None, RawAudio("s16le", RATE)])
def test_an_empty_file(write: Write, raw: RawAudio | None) -> None:
    with pytest.raises(EmptyAudio) as caught:
        decoded(write(b""), raw=raw)
    assert caught.value.hint


def test_no_samples(write: Write) -> None:
    for data, raw in ((wav(silence(0)), None), (b"\x01", RawAudio("s16le", RATE))):
        with pytest.raises(EmptyAudio):
            decoded(write(data), raw=raw)


RUBBISH: dict[str, bytes] = {
    "one byte": b"\0",
    "zeros": bytes(100_000),
    "text": b"This is no recording.\n" * 1000,
    "html": b"<!doctype html><html><body>404</body></html>",
    "json": b'{"error": "not found"}',
    "png": b"\x89PNG\r\n\x1a\n" + bytes(1000),
    "pdf": b"%PDF-1.7\n" + bytes(1000),
    "zip": b"PK\x03\x04" + bytes(1000),
    "noise": np.random.default_rng(11).bytes(300_000),
    "subtitles": b"WEBVTT\n\n00:01.000 --> 00:02.000\nHello\n",
}


@pytest.mark.parametrize("name", RUBBISH)
def test_what_is_not_audio(write: Write, name: str) -> None:
    with pytest.raises(UnsupportedAudio) as caught:
        decoded(write(RUBBISH[name]))
    assert "wav" in caught.value.hint


def test_video_without_sound(write: Write) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24")
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with pytest.raises(UnsupportedAudio, match="no audio track"):
        decoded(write(buffer.getvalue()))


def test_a_missing_file_is_not_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), AudioFile(tmp_path / "gone"):
        pass


# ---------------------------------------------------------------- hostile files


def _scripts(target: Path) -> dict[str, bytes]:
    """Files that ask a player to open ``target``."""
    hls = "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{}\n#EXT-X-ENDLIST\n"
    mpd = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT3S">'
        '<Period><AdaptationSet mimeType="audio/wav"><Representation id="1" bandwidth="1"><SegmentList>'
        f'<SegmentURL media="{target}"/></SegmentList></Representation></AdaptationSet></Period></MPD>'
    )
    return {
        "m3u8": hls.format(target).encode(),
        "m3u8 with file:": hls.format(f"file://{target}").encode(),
        "m3u8 beside": hls.format(target.name).encode(),
        "m3u8 over http": hls.format("http://127.0.0.1:9/a.ts").encode(),
        "m3u": f"#EXTM3U\n{target}\n".encode(),
        "ffconcat": f"ffconcat version 1.0\nfile {target.name}\n".encode(),
        "ffconcat absolute": f"ffconcat version 1.0\nfile '{target}'\n".encode(),
        "ffconcat with option": f"ffconcat version 1.0\nfile {target.name}\noption safe 0\n".encode(),
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
        "mpd": mpd.encode(),
    }


@pytest.mark.parametrize("walls", ["both", "no list of demuxers"])
@pytest.mark.parametrize("name", _scripts(Path("x")))
def test_a_file_cannot_name_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, walls: str) -> None:
    """A wav lies right beside the upload; neither wall alone lets it be read."""
    target = tmp_path / "secret.wav"
    target.write_bytes(wav(clip(SENTENCE)))
    monkeypatch.chdir(tmp_path)
    if walls != "both":
        monkeypatch.setattr(decode, "DEMUXERS", decode.DEMUXERS + ",hls,concat,sdp,dash,rtp,rtsp,lavfi,image2")
    upload = tmp_path / "upload"
    upload.write_bytes(_scripts(target)[name])
    with pytest.raises((UnsupportedAudio, EmptyAudio)):
        decoded(upload)


def test_only_audio_decoders_may_run() -> None:
    allowed = set(decode._audio_decoders().split(","))
    assert {"aac", "opus", "mp3float", "pcm_s16le", "vorbis", "flac", "amrnb"} <= allowed
    assert not allowed & {"h264", "hevc", "vp8", "vp9", "mpeg4", "mjpeg", "png", "ass", "srt"}


def test_ffmpeg_is_silent(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    damaged = bytearray((DATA / f"{SENTENCE}.m4a").read_bytes())
    for position in range(2000, 20_000, 1000):
        damaged[position] ^= 0xFF
    with AudioFile(write(bytes(damaged))) as file:
        list(file)
    assert file.corrupt_packets
    with pytest.raises(UnsupportedAudio):
        decoded(write(RUBBISH["noise"]))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- damage

DAMAGED = ("mp3", "m4a", "webm", "wav")


@pytest.mark.parametrize("suffix", ["mp3", "webm", "wav"])
def test_a_file_cut_short_gives_what_it_has(write: Write, suffix: str) -> None:
    data = (DATA / f"{SENTENCE}.{suffix}").read_bytes()
    audio = decoded(write(data[: len(data) * 6 // 10]))
    original = clip(SENTENCE)
    assert 0.5 * len(original) < len(audio) < 0.65 * len(original)
    assert likeness(audio, original[: len(audio)]) > 0.95


@pytest.mark.parametrize("suffix", DAMAGED)
def test_damage_in_the_middle_costs_the_middle(write: Write, suffix: str) -> None:
    data = bytearray((DATA / f"{SENTENCE}.{suffix}").read_bytes())
    middle = len(data) // 2
    data[middle : middle + len(data) // 25] = np.random.default_rng(3).bytes(len(data) // 25)
    audio, original = decoded(write(bytes(data))), clip(SENTENCE)
    third = len(original) // 3
    assert len(audio) > 0.75 * len(original)
    assert likeness(audio[:third], original[:third]) > 0.95
    tail = resample(audio, RATE)[-third:]
    assert max(likeness(tail, original[-third - shift :]) for shift in range(-1600, 1601, 400)) > 0.9


def test_nothing_decodes(write: Write) -> None:
    data = bytearray((DATA / f"{SENTENCE}.m4a").read_bytes())
    start, end = data.find(b"mdat") + 4, data.find(b"moov") - 4
    data[start:end] = b"\xff" * (end - start)
    with pytest.raises(UnsupportedAudio, match="decoded"):
        decoded(write(bytes(data)))


@pytest.mark.parametrize(("first", "second"), [((RATE, 1), (44_100, 2)), ((48_000, 2), (24_000, 1))])
@pytest.mark.parametrize(("container", "codec"), [("mp3", "libmp3lame"), ("adts", "aac")])
def test_rate_and_channels_change_in_mid_stream(
    write: Write, container: str, codec: str, first: tuple[int, int], second: tuple[int, int]
) -> None:
    original = clip(SENTENCE)
    data = b"".join(encode(original, container, codec, rate=rate, channels=count) for rate, count in (first, second))
    audio = decoded(write(data))
    assert abs(len(audio) - 2 * len(original)) < 0.15 * RATE + 1600
    assert likeness(audio[: len(original)], original) > 0.95
    assert likeness(audio[-len(original) - 1600 :], original) > 0.95


# ---------------------------------------------------------------- live containers


class Trickle:
    """Bytes that arrive a few at a time; remembers how many were asked for."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece, self.taken = data, piece, 0

    def read(self, size: int, /) -> bytes:
        start = self.taken
        self.taken += len(self.data[start : start + min(size, self.piece)])
        return self.data[start : self.taken]


@pytest.mark.parametrize(("suffix", "patience"), [("webm", 0.7), ("mp3", 0.7)])
def test_a_stream_gives_sound_while_it_arrives(suffix: str, patience: float) -> None:
    data = (DATA / f"{SENTENCE}.{suffix}").read_bytes()
    source = Trickle(data, 100)
    blocks, behind = [], []
    for audio in decode_stream(source):
        blocks.append(audio)
        behind.append(source.taken / len(data) * len(clip(SENTENCE)) - sum(map(len, blocks)))
    assert max(behind) < patience * RATE
    whole = decoded(DATA / f"{SENTENCE}.{suffix}")
    assert len(np.concatenate(blocks)) >= len(whole)  # what is padding at the end only a file can tell
    assert np.abs(np.concatenate(blocks)[: len(whole)] - whole)[:-400].max() < 1e-5


def test_a_stream_that_is_no_sound() -> None:
    with pytest.raises(UnsupportedAudio):
        list(decode_stream(Trickle(RUBBISH["text"], 100)))


def test_a_packet_of_any_length_is_resampled_in_pieces() -> None:
    """One packet of a minute at the lowest rate would become 16 times as long at once."""
    minute = np.zeros(60 * pcm.MIN_RATE, np.float32)
    pieces = list(decode._resampled(iter([(minute, pcm.MIN_RATE)])))
    assert max(map(len, pieces)) <= 2 * RATE
    assert sum(map(len, pieces)) == 60 * RATE
