"""Segments of real speech: nothing said is lost, cuts lie in silence, a resumed run is the same run, noise is no speech."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.messages import Lane
from tests.speech import NAMES, RATE, Audio, clip, join, recital, silence, transcripts, wav, without_pauses, word_errors
from worker.audio.decode import AudioFile
from worker.audio.vad import FRAME, SileroVad, VadState
from worker.engines.base import Final, SequenceRequest
from worker.engines.embedded import EmbeddedEngine
from worker.files.segments import BLOCK_FRAMES, Segment, Segmenter, SegmentPolicy

VAD = SileroVad()
SHORT = SegmentPolicy(max_s=4.0, aim_s=3.0)
"""Many cuts, most of them forced."""


def cut(audio: Audio, policy: SegmentPolicy | None = None, *, base: int = 0, index: int = 0) -> list[Segment]:
    """All segments of ``audio`` from ``base`` on, given in seconds."""
    segmenter = Segmenter(VAD, policy or SegmentPolicy(), base_sample=base, next_index=index)
    segments = [
        found for start in range(base, len(audio), RATE) for found in segmenter.push(audio[start : start + RATE])
    ]
    return segments + segmenter.flush()


def same(ours: list[Segment], theirs: list[Segment]) -> bool:
    def key(segment: Segment) -> tuple[object, ...]:
        sound = segment.audio.tobytes()
        return (
            segment.index,
            sound,
            segment.start_sample,
            segment.speech_end_sample,
            segment.end_sample,
            segment.speech,
        )

    return [key(segment) for segment in ours] == [key(segment) for segment in theirs]


def spoken(audio: Audio, *, least: int = 8) -> list[tuple[int, int]]:
    """Runs of at least ``least`` frames that the VAD, never reset, takes for speech; samples."""
    count = len(audio) // FRAME
    speech = VAD.sequence(VadState(), audio[: count * FRAME].reshape(count, FRAME)) >= 0.5
    edges = np.flatnonzero(np.diff(np.concatenate(([0], speech.astype(int), [0])))).reshape(-1, 2)
    return [(int(a) * FRAME, int(b) * FRAME) for a, b in edges if b - a >= least]


MIXED, _ = recital(1, [0.3, 0.7, 1.6, 0.45, 1.1, 2.5])
BREATHLESS = np.concatenate([silence(0.4), recital(1, [0], trim=True)[0]])


# ---------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("policy", [SegmentPolicy(), SHORT, SegmentPolicy.up_to(30)], ids=["10 s", "4 s", "30 s"])
@pytest.mark.parametrize("audio", [MIXED, BREATHLESS], ids=["pauses", "breathless"])
def test_segments_hold_all_speech_in_order(audio: Audio, policy: SegmentPolicy) -> None:
    segments = cut(audio, policy)
    assert [segment.index for segment in segments] == list(range(len(segments)))
    covered = np.zeros(len(audio), bool)
    before = 0
    for segment in segments:
        assert before <= segment.start_sample < segment.speech_end_sample <= segment.end_sample <= len(audio)
        assert np.array_equal(segment.audio, audio[segment.start_sample : segment.speech_end_sample])
        assert len(segment.audio) <= policy.max_s * RATE
        assert segment.audio.dtype == np.float32 and segment.audio.base is None
        covered[segment.start_sample : segment.speech_end_sample] = True
        inside = [
            segment.start_sample,
            *(edge for region in segment.speech for edge in region),
            segment.speech_end_sample,
        ]
        assert inside == sorted(inside) and segment.speech
        before = segment.end_sample
    for start, end in spoken(audio):
        assert covered[start:end].mean() > 0.99, f"speech at {start / RATE:.2f} s"


@pytest.mark.parametrize("size", [100, 511, 16_000, 10**9])
def test_chunks_of_any_size_give_the_same_segments(size: int) -> None:
    segmenter = Segmenter(VAD, SHORT)
    audio = MIXED[: 25 * RATE]
    segments = [found for start in range(0, len(audio), size) for found in segmenter.push(audio[start : start + size])]
    assert same(segments + segmenter.flush(), cut(audio, SHORT))


def test_the_end_of_the_recording_is_the_end_of_the_last_segment() -> None:
    for tail in (0.0, 0.01, 0.3, 0.9):
        audio = np.concatenate([clip("librivox-0930"), silence(tail)])[: -1 if tail else None]
        assert cut(audio)[-1].end_sample == len(audio)


# ---------------------------------------------------------------- resumption


@pytest.mark.parametrize("policy", [SegmentPolicy(), SHORT], ids=["10 s", "4 s"])
@pytest.mark.parametrize("audio", [MIXED, BREATHLESS], ids=["pauses", "breathless"])
def test_resuming_at_any_segment_is_the_same_run(audio: Audio, policy: SegmentPolicy) -> None:
    whole = cut(audio, policy)
    assert len(whole) >= 4
    for done, segment in enumerate(whole[:-1], start=1):
        rest = cut(audio, policy, base=segment.end_sample, index=done)
        assert same(rest, whole[done:])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from(NAMES[1:]), min_size=2, max_size=4),
    pauses=st.lists(st.floats(0, 2), min_size=1, max_size=4),
    longest=st.sampled_from([3.0, 6.0, 10.0]),
    chunk=st.integers(50, 40_000),
    trim=st.booleans(),
    data=st.data(),
)
def test_resuming_is_exact_for_any_recording(
    names: list[str], pauses: list[float], longest: float, chunk: int, trim: bool, data: st.DataObject
) -> None:
    audio, _ = recital(1, pauses, names=names, trim=trim)
    policy = SegmentPolicy(max_s=longest, aim_s=0.8 * longest)
    whole = cut(audio, policy)
    done = data.draw(st.integers(1, len(whole)))
    base = whole[done - 1].end_sample
    segmenter = Segmenter(VAD, policy, base_sample=base, next_index=done)
    rest = [found for at in range(base, len(audio), chunk) for found in segmenter.push(audio[at : at + chunk])]
    assert same(rest + segmenter.flush(), whole[done:])


def test_resuming_in_a_long_silence() -> None:
    """The point of resumption moves on in silence, and a run from there is the same too."""
    audio = np.concatenate([clip("librivox-0880"), silence(40), clip("librivox-0930"), silence(1)])
    whole = cut(audio)
    segmenter = Segmenter(VAD, SegmentPolicy())
    points = set()
    for start in range(0, len(audio), RATE):
        segmenter.push(audio[start : start + RATE])
        points.add(segmenter.resume_sample)
    between = sorted(point for point in points if whole[0].end_sample < point < whole[1].start_sample)
    assert len(between) >= 3
    for point in between:
        assert same(cut(audio, base=point, index=1), whole[1:])


# ---------------------------------------------------------------- where it cuts


@pytest.mark.parametrize("pause", [1.3, 2.0, 4.0])
def test_a_long_pause_ends_a_segment(pause: float) -> None:
    first, second = clip("librivox-0880"), clip("librivox-0930")
    segments = cut(join([first, second], [0.5, pause]))
    assert len(segments) == 2
    (_, end), (begin, _) = segments[0].speech[-1], segments[1].speech[0]
    assert end < segments[0].speech_end_sample < segments[0].end_sample
    assert segments[0].end_sample - end == pytest.approx(
        0.6 * RATE, abs=FRAME
    )  # the middle of what is known to be a pause
    assert segments[1].start_sample >= begin - 0.6 * RATE


def test_an_engine_that_takes_thirty_seconds_gets_twenty_to_thirty() -> None:
    """Of somebody who pauses for half a second now and then; what is left over may be less."""
    audio = join([clip(name) for name in NAMES] * 2, [0.5])
    lengths = [(segment.end_sample - segment.start_sample) / RATE for segment in cut(audio, SegmentPolicy.up_to(30))]
    assert len(lengths) >= 3
    assert all(20 <= length <= 30 for length in lengths[:-1]), lengths


def test_short_pauses_do_not() -> None:
    segments = cut(join([clip("librivox-0880"), clip("librivox-0930")], [0.5, 0.3]))
    assert len(segments) == 1


def test_a_forced_cut_takes_the_pause_there_is() -> None:
    """Twelve seconds with one pause of 0.45 s, filled with noise: the cut lies in it, and not in a gap that is quieter but
    too short for a pause, as the closure of a stop is."""
    first, second = without_pauses(clip("librivox-0920")), without_pauses(clip("librivox-0870")).copy()
    second[2 * RATE : round(2.1 * RATE)] = 0
    audio = np.concatenate([silence(0.3), first, noise(-40)[: round(0.45 * RATE)], second, silence(1)])
    begin = round(0.3 * RATE) + len(first)
    segments = cut(audio)
    assert len(segments) == 2
    assert begin < segments[0].end_sample < begin + 0.45 * RATE


def test_where_nobody_pauses_it_cuts_in_the_quietest_place() -> None:
    audio = BREATHLESS[: 15 * RATE].copy()
    audio += np.float32(0.003) * np.sin(np.arange(len(audio)) / 7, dtype=np.float32)  # no place is quiet by chance
    dip = slice(round(8.0 * RATE), round(8.11 * RATE))
    audio[dip] *= np.float32(0.01)
    (first, *_) = cut(audio, SegmentPolicy(min_pause_s=0.5))
    assert dip.start < first.end_sample < dip.stop


def test_a_cut_in_mid_speech_loses_nothing_of_the_next_word() -> None:
    """The VAD begins anew in mid-word; wherever that is, the segment begins with the cut."""
    cuts = range(round(0.7 * RATE), len(BREATHLESS) - 3 * RATE, RATE // 3)
    starts = [cut(BREATHLESS[at : at + 3 * RATE])[0].start_sample for at in cuts]
    assert starts == [0] * len(cuts)


def test_fragments_are_rare() -> None:
    audio, _ = recital(2, [0.3, 0.7, 0.45, 1.1])
    lengths = [len(segment.audio) / RATE for segment in cut(audio)]
    assert np.mean(lengths) > 5
    assert min(lengths) > 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_s": 1.0, "aim_s": 1.0},
        {"aim_s": 11.0},
        {"threshold": 0.3},
        {"pause_search": 1.0},
        {"quiet_search": 0.8},
    ],
)
def test_impossible_policies(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"\."):
        SegmentPolicy(**wrong)


# ---------------------------------------------------------------- words


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine()
    engine.load(lambda _phase, _fraction: None)
    yield engine
    engine.close()


def heard(engine: EmbeddedEngine, audio: Audio) -> str:
    sequence = engine.open(SequenceRequest(id="words", lane=Lane.BATCH))
    engine.feed(sequence, audio)
    engine.finish(sequence)
    (event,) = engine.step([sequence], 0)
    assert isinstance(event, Final)
    return event.text


def test_cutting_costs_no_words(engine: EmbeddedEngine) -> None:
    alone = sum(word_errors(transcripts()[name], heard(engine, clip(name))) for name in NAMES)
    audio, said = recital(1, [0.4, 1.4, 0.9])
    segments = cut(audio)
    text = " ".join(heard(engine, segment.audio) for segment in segments)
    assert len(segments) > 4
    assert word_errors(said, text) <= alone + 2, text


# ---------------------------------------------------------------- quiet, short


@pytest.mark.parametrize("level", [-40, -50])
def test_quiet_speech_is_found(level: int) -> None:
    """Quantised to 16 bits at that level (dBFS, root mean square), as a recording would be."""
    for name in NAMES[:5]:
        audio = clip(name)
        gain = 10 ** (level / 20) / float(np.sqrt((audio**2).mean()))
        quiet = (np.round(audio * gain * 32768) / 32768).astype(np.float32)
        found = sum(end - start for segment in cut(quiet) for start, end in segment.speech)
        loud = sum(end - start for segment in cut(audio) for start, end in segment.speech)
        assert found > 0.9 * loud


@pytest.mark.parametrize(
    ("begin", "end"), [(3.25, 3.87), (3.93, 4.45), (3.95, 4.25), (0.3, 0.55)], ids=["ask", "not", "no", "and"]
)
def test_a_short_word_alone_survives(begin: float, end: float) -> None:
    """Words and parts of words of Kennedy's, between seconds of silence; the shortest is 250 ms long."""
    word = clip("jfk")[round(begin * RATE) : round(end * RATE)]
    (segment,) = cut(np.concatenate([silence(2), word, silence(2)]))
    assert segment.start_sample <= 2 * RATE
    assert segment.speech_end_sample >= 2 * RATE + 0.9 * len(word)


# ---------------------------------------------------------------- no speech

SECONDS = 10
TIME = np.arange(SECONDS * RATE) / RATE
RANDOM = np.random.default_rng(7)


def noise(level: float) -> Audio:
    return (RANDOM.standard_normal(len(TIME)) * 10 ** (level / 20)).clip(-1, 1).astype(np.float32)


def hum(level: float, *, harmonics: int = 1) -> Audio:
    parts = [np.sin(2 * np.pi * 50 * part * TIME) / part for part in range(1, harmonics + 1)]
    return np.asarray(level * np.sum(parts, axis=0), np.float32)


def clicks(rate: float, width: int) -> Audio:
    audio = silence(SECONDS)
    for start in RANDOM.integers(0, len(audio) - width, round(rate * SECONDS)):
        audio[start : start + width] += (RANDOM.standard_normal(width) * np.exp(-4 * np.arange(width) / width)) * 0.7
    return np.asarray(audio.clip(-1, 1), np.float32)


def tune() -> Audio:
    """Plucked notes of a scale, four a second, with five harmonics."""
    audio, length = silence(SECONDS), RATE
    for number in range(4 * SECONDS - 4):
        pitch = 220 * 2 ** (RANDOM.choice([0, 2, 4, 5, 7, 9, 11, 12]) / 12)
        at = np.arange(length) / RATE
        note = sum(np.sin(2 * np.pi * pitch * part * at) / part**1.5 for part in range(1, 6)) * np.exp(-4 * at) * 0.15
        audio[number * RATE // 4 : number * RATE // 4 + length] += note
    return audio


def ringing() -> Audio:
    tone = np.sin(2 * np.pi * 440 * TIME) + np.sin(2 * np.pi * 480 * TIME)
    return (0.2 * tone * (TIME % 6 < 2)).astype(np.float32)


NOT_SPEECH: dict[str, Audio] = {
    "silence": silence(SECONDS),
    **{f"white noise {level} dB": noise(level) for level in (-60, -40, -20, -3)},
    "noise in steps": noise(-10) * np.where(TIME % 2 < 1, 0.02, 1).astype(np.float32),
    "hum": hum(0.5),
    "quiet hum": hum(0.01),
    "hum with harmonics": hum(0.3, harmonics=7),
    "single samples": clicks(4, 1),
    "clicks": clicks(4, 160),
    "knocks": clicks(10, 800),
    "tune": tune(),
    "ringing": ringing(),
    "tune and noise": tune() + noise(-34),
    "hum, clicks and noise": hum(0.1) + clicks(4, 160) + noise(-34),
    "all of it": tune() + hum(0.1, harmonics=5) + clicks(10, 800) + noise(-30),
    "offset": np.full(SECONDS * RATE, 0.5, np.float32),
}


@pytest.mark.parametrize("name", NOT_SPEECH)
def test_what_is_not_speech_makes_no_segment(name: str) -> None:
    assert cut(NOT_SPEECH[name]) == []


def test_speech_in_noise_is_found_all_the_same() -> None:
    audio = NOT_SPEECH["hum, clicks and noise"].copy()
    audio[4 * RATE : 4 * RATE + len(clip("librivox-0930"))] += clip("librivox-0930")
    (segment,) = cut(audio)
    assert 3.5 * RATE < segment.start_sample < 4.6 * RATE
    assert 6.5 * RATE < segment.speech_end_sample < 8 * RATE


# ---------------------------------------------------------------- memory


def test_silence_is_not_kept() -> None:
    segmenter = Segmenter(VAD, SegmentPolicy())
    held = []
    for _ in range(90):
        assert segmenter.push(silence(1)) == []
        held.append(segmenter.buffered)
    assert max(held) < 3 * RATE
    assert segmenter.resume_sample > 75 * RATE


@pytest.mark.parametrize("policy", [SegmentPolicy(), SHORT], ids=["10 s", "4 s"])
def test_no_more_than_the_longest_segment_is_kept(policy: SegmentPolicy) -> None:
    segmenter = Segmenter(VAD, policy)
    held = []
    for start in range(0, len(BREATHLESS), RATE):
        segmenter.push(BREATHLESS[start : start + RATE])
        held.append(segmenter.buffered)
    assert max(held) <= policy.max_s * RATE + BLOCK_FRAMES * FRAME + 1.5 * RATE


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("minutes", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_a_long_recording_needs_no_more_memory_than_a_minute(tmp_path: Path, minutes: int) -> None:
    minute = join([clip(name) for name in (*NAMES, "jfk", "librivox-0920")], [0.5, 1.5])
    path = tmp_path / "long.wav"
    header, repeats = wav(silence(0)), 1 + minutes * 60 * RATE // len(minute)
    body = wav(minute)[len(header) :]
    total = repeats * len(body)
    with path.open("wb") as file:
        file.write(header[:4] + (total + 36).to_bytes(4, "little") + header[8:40] + total.to_bytes(4, "little"))
        for _ in range(repeats):
            file.write(body)
    levels, seconds = [], 0.0
    segmenter = Segmenter(VAD, SegmentPolicy())
    with AudioFile(path) as recording:
        for block in recording:
            seconds += sum(len(segment.audio) for segment in segmenter.push(block)) / RATE
            if recording.samples % (10 * RATE) < RATE:
                levels.append(resident())
    assert recording.samples >= minutes * 60 * RATE
    assert seconds > 0.7 * minutes * 60
    assert max(levels) - levels[5] < 12 * 2**20  # 30 minutes are 110 MiB of floats, 5 are 18
