"""The scripted engine: its text accounts for every sample, and its bad behaviour is what the options say."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
import time
import wave
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import EngineFailed, ModelLoadFailed, OutOfMemory
from shared.messages import Lane
from tests.speech import RATE, clip, encode, resample, silence, wav
from worker.audio.samples import Audio
from worker.engines.base import EngineBroken, EngineEvent, Final, Hypothesis, SequenceFailed, SequenceRequest
from worker.engines.scripted import ScriptedEngine, ScriptedOptions, ScriptedSequence, clock_word, scripted_audio
from worker.engines.tones import TORN, hear

SENTENCE = "Ask not, what your country 2024 — schön 日本語 can-do!"


def engine(spec: str = "") -> ScriptedEngine:
    made = ScriptedEngine(ScriptedOptions.parse(spec))
    made.load(lambda phase, fraction: None)
    return made


def segment(made: ScriptedEngine, audio: Audio, **fields: object) -> ScriptedSequence:
    row = made.open(SequenceRequest("a", Lane.BATCH, **fields))  # type: ignore[arg-type]
    made.feed(row, audio)
    made.finish(row)
    return row


def run(made: ScriptedEngine, rows: Sequence[ScriptedSequence]) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while ready := [row for row in rows if row.ready]:
        events += made.step(ready, 0)
    return events


def final(made: ScriptedEngine, audio: Audio, **fields: object) -> Final:
    event = run(made, [segment(made, audio, **fields)])[-1]
    assert isinstance(event, Final)
    return event


def text(audio: Audio, spec: str = "", **fields: object) -> str:
    return final(engine(spec), audio, **fields).text


# ---------------------------------------------------------------- words as tones

WORDS = st.lists(st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=12), min_size=1, max_size=5)


@given(WORDS)
@settings(max_examples=60, deadline=None)
def test_words_come_back(words: list[str]) -> None:
    assert text(scripted_audio(words)).split(" ") == words


def test_words_take_their_time() -> None:
    assert len(scripted_audio("hello")) == (5 + 3) * RATE // 25
    assert len(scripted_audio("hello again")) == (5 + 3 + 5 + 3) * RATE // 25


def test_words_survive_a_16_bit_file() -> None:
    with wave.open(io.BytesIO(wav(scripted_audio(SENTENCE)))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert text((samples / 32768).astype(np.float32)) == SENTENCE


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000])
def test_words_survive_resampling(rate: int) -> None:
    import soxr

    there = resample(scripted_audio(SENTENCE), rate)
    back: Any = soxr.resample(there, rate, RATE)
    assert text(back) == SENTENCE


@pytest.mark.parametrize(
    ("container", "codec", "rate", "bit_rate"),
    [
        ("wav", "pcm_mulaw", 8000, 0),
        ("mp3", "libmp3lame", 16_000, 32_000),
        ("ogg", "libopus", 48_000, 24_000),
        ("mp4", "aac", 44_100, 64_000),
    ],
)
def test_words_survive_codecs(container: str, codec: str, rate: int, bit_rate: int) -> None:
    import av

    encoded = encode(scripted_audio(SENTENCE), container, codec, rate=rate, bit_rate=bit_rate)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(io.BytesIO(encoded), mode="r") as file:
        frames = [part.to_ndarray()[0] for frame in file.decode(audio=0) for part in resampler.resample(frame)]
    assert text(np.concatenate(frames)) == SENTENCE


@given(st.integers(0, 50_000), st.integers(1000, 4000))
@settings(max_examples=80, deadline=None, derandomize=True)  # one torn word in 256 would pass its checksum
def test_lost_audio_is_never_another_word(start: int, length: int) -> None:
    said = [f"w{number:04d}" for number in range(10)]
    whole = scripted_audio(said)
    start %= len(whole) - length
    heard = [word.text for word in hear(np.concatenate([whole[:start], whole[start + length :]]))]
    # A pause between two words has 640 samples: losing more loses a part of a word.
    assert heard != said
    assert set(heard) <= {*said, TORN}


def test_doubled_audio_is_seen() -> None:
    whole = scripted_audio("one two three")
    assert text(np.concatenate([whole[:9000], whole[3000:]])) != "one two three"


def test_torn_edges_are_marked() -> None:
    whole = scripted_audio("one two three")
    assert text(whole[1000:], "hears=tones") == f"{TORN} two three"
    assert text(whole[:-1500]) == f"one two {TORN}"


def test_places_of_words_are_exact() -> None:
    audio = np.concatenate([silence(0.5), scripted_audio("one two")])
    first, second = final(engine(), audio, words=True).words
    assert (first.text, second.text) == ("one", "two")
    assert (first.start, second.start) == pytest.approx((0.5, 0.5 + 0.24), abs=0.003)
    assert (first.end, second.end) == pytest.approx((0.5 + 0.20, 0.5 + 0.44), abs=0.003)


# ---------------------------------------------------------------- words by the clock


CUTS = st.one_of(st.integers(1, 175_999), st.integers(1, 34).map(lambda number: number * 5120))


@given(st.lists(CUTS, max_size=8, unique=True), st.sampled_from([0, 5120, 512_000, 99_999_999]))
@settings(max_examples=60, deadline=None)
def test_a_recording_in_sequences_gives_every_word_once(cuts: list[int], base: int) -> None:
    speech = np.concatenate([clip("jfk")[6000:], clip("jfk")[:6000]])  # begins and ends with sound
    edges = [0, *sorted(cuts), len(speech)]
    words: list[str] = []
    made = engine("hears=clock")
    for start, end in pairwise(edges):
        words += final(made, speech[start:end], base_sample=base + start).text.split()
    assert words == [clock_word(sample) for sample in range(base, base + len(speech)) if sample % 5120 == 0]


def test_words_of_the_clock_are_milliseconds() -> None:
    assert text(clip("librivox-0880"), base_sample=16_000) == " ".join(
        f"s{ms:06d}" for ms in range(1280, 4000, 320) if ms < 1000 + 1000 * len(clip("librivox-0880")) / RATE
    )
    assert text(clip("librivox-0880"), "word_ms=1000") == "s000000 s001000 s002000"


def test_silence_has_no_words_until_something_sounds() -> None:
    made = engine()
    row = made.open(SequenceRequest("a", Lane.LIVE, partials=True))
    made.feed(row, silence(2.0))
    assert [event.text for event in run(made, [row]) if isinstance(event, Hypothesis)] == [""]
    made.feed(row, clip("librivox-0880"))
    texts = [event.text for event in run(made, [row]) if isinstance(event, Hypothesis)]
    assert texts[0].startswith("s000000")


@pytest.mark.parametrize("audio", [scripted_audio(SENTENCE), clip("librivox-0880")], ids=["tones", "clock"])
def test_hypotheses_only_grow(audio: Audio) -> None:
    made = engine("words=1")
    row = made.open(SequenceRequest("a", Lane.LIVE, partials=True))
    texts = [""]
    for start in range(0, len(audio), 1111):
        made.feed(row, audio[start : start + 1111])
        texts += [event.text for event in run(made, [row]) if isinstance(event, Hypothesis)]
    made.finish(row)
    last = run(made, [row])[-1]
    assert isinstance(last, Final)
    texts.append(last.text)
    assert len(set(texts)) > 5
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert last.text == text(audio)


# ---------------------------------------------------------------- like a large engine


def test_some_words_a_step_and_some_rows_a_step() -> None:
    made = engine("words=2,batch=2")
    rows = [segment(made, scripted_audio("a b c d e"), partials=True) for _ in range(3)]
    steps = [made.step(rows, 0) for _ in range(3)]
    assert [[getattr(event, "text", None) for event in events] for events in steps] == [
        ["a b", "a b"],
        ["a b c d", "a b c d"],
        ["a b c d e", "a b c d e"],
    ]
    assert [event.sequence for event in steps[2]][1] is rows[1]


def test_suspending_drops_the_state() -> None:
    made = engine("words=2")
    row = segment(made, scripted_audio("a b c d"), partials=True)
    assert [getattr(event, "text", "") for event in made.step([row], 0)] == ["a b"]
    made.suspend(row)
    assert (row.tokens, row.places, row.said, row.decoded) == ([], [], 0, 0)
    assert [getattr(event, "text", "") for event in run(made, [row])] == ["a b", "a b c d"]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", "one two three"),
        ("one", "one two three"),
        ("one two ", "one two three"),
        ("ONE, two", "ONE, two three"),
        ("one two three", "one two three"),
        ("one two three four", "one two three four"),
    ],
)
def test_it_goes_on_after_a_prefix(prefix: str, expected: str) -> None:
    events = run(
        made := engine("words=1"), [segment(made, scripted_audio("one two three"), prefix=prefix, partials=True)]
    )
    texts = [event.text for event in events if isinstance(event, Hypothesis | Final)]
    assert texts[-1] == expected
    assert len(texts) == max(1, 3 - len(prefix.split()))  # what the prefix says costs no step
    assert all(text.startswith(prefix) for text in texts)


def test_unstable_words_are_wrong_until_the_audio_ends() -> None:
    made = engine("unstable=2,words=9")
    row = made.open(SequenceRequest("a", Lane.LIVE, partials=True))
    made.feed(row, scripted_audio("one two three"))
    assert [getattr(event, "text", "") for event in run(made, [row])] == ["one two? three?"]
    made.feed(row, scripted_audio("four five"))
    assert [getattr(event, "text", "") for event in run(made, [row])] == ["one two three four? five?"]
    made.freeze(row, "one two three four?")
    made.feed(row, scripted_audio("six seven"))
    made.finish(row)
    assert [getattr(event, "text", "") for event in run(made, [row])] == ["one two three four? five six seven"]


def test_a_run_away_that_was_said_stays() -> None:
    made = engine("runaway=word,words=1")
    row = segment(made, scripted_audio("one"), partials=True)
    for _ in range(6):
        made.step([row], 0)
    made.freeze(row, "one the the the the the")
    last = run(made, [row])[-1]
    assert isinstance(last, Final)
    assert (last.text, last.finish_reason) == ("one the the the the the", "repetition")


def test_a_prefix_it_does_not_take_is_ignored() -> None:
    assert text(scripted_audio("one two"), "prefix=0", prefix="zero") == "one two"


def test_probabilities() -> None:
    event = final(engine(), scripted_audio("one two"))
    assert [token for token, _ in event.logprobs] == [" one", " two"]
    assert event.avg_logprob is not None
    assert event.avg_logprob < 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("char", "oneaa"),
        ("word", "one the the"),
        ("pattern", "one thank you very much. thank you very much."),
    ],
)
def test_the_guard_ends_run_aways(kind: str, expected: str) -> None:
    event = final(engine(f"runaway={kind}"), scripted_audio("one"))
    assert (event.text, event.finish_reason) == (expected, "repetition")


@pytest.mark.parametrize("kind", ["char", "word", "pattern"])
def test_without_the_guard_run_aways_use_their_budget(kind: str) -> None:
    event = final(engine(f"runaway={kind},guard=0,budget=60"), scripted_audio("one"))
    assert event.finish_reason == "length"
    assert len(event.text) >= 3 + 60


def test_junk_uses_its_budget_in_spite_of_the_guard() -> None:
    event = final(engine("runaway=junk,budget=60"), scripted_audio("one"))
    assert event.finish_reason == "length"
    assert len(set(event.text.split())) == 61


# ---------------------------------------------------------------- options


def test_options_of_a_model_name() -> None:
    options = ScriptedOptions.parse("step_ms=2.5,batch=7,crash_at=3,poison=bad word,prefix=0,runaway=char,load_s=1")
    assert options == ScriptedOptions(
        step_ms=2.5, batch=7, crash_at=3, poison="bad word", prefix=False, runaway="char", load_s=1.0
    )
    assert ScriptedOptions.parse("") == ScriptedOptions()


@pytest.mark.parametrize(
    "spec", ["speed=3", "batch=many", "batch=0", "hears=all", "runaway=slow", "times=some", "prefix=yes"]
)
def test_options_it_does_not_know(spec: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ScriptedOptions.parse(spec)


def test_capabilities_follow_the_options() -> None:
    made = ScriptedEngine(
        ScriptedOptions.parse("batch=9,live=3,prefix=0,streams=1,times=none,segment_s=12,max_step_s=4")
    )
    found = made.load(lambda phase, fraction: None)
    assert (found.max_batch, found.max_live, found.max_segment_s, found.max_step_s) == (9, 3, 12, 4)
    assert (found.accepts_prefix, found.streams_natively, found.word_times) == (False, True, "none")


def test_loading_and_steps_cost_what_they_shall() -> None:
    phases: list[tuple[str, float]] = []
    began = time.perf_counter()
    made = ScriptedEngine(ScriptedOptions.parse("load_s=0.1,step_ms=50,words=1"))
    made.load(lambda phase, fraction: phases.append((phase, fraction)))
    assert time.perf_counter() - began >= 0.1
    assert [fraction for phase, fraction in phases if phase == "loading"] == [tenth / 10 for tenth in range(10)]
    began = time.perf_counter()
    final(made, scripted_audio("one two"))
    assert time.perf_counter() - began >= 2 * 0.05


def test_a_load_that_fails() -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        engine("load_fails=1")
    assert caught.value.hint


# ---------------------------------------------------------------- bad behaviour


@pytest.mark.parametrize(
    ("spec", "error"), [("fail_at=2", EngineFailed), ("oom_at=2", OutOfMemory), ("break_at=2", EngineBroken)]
)
def test_steps_that_fail(spec: str, error: type[Exception]) -> None:
    made = engine(f"{spec},words=1")
    row = segment(made, scripted_audio("one two three"), partials=True)
    made.step([row], 0)
    with pytest.raises(error):
        made.step([row], 0)
    assert [getattr(event, "text", "") for event in run(made, [row])][-1] == "one two three"


def test_a_rejected_row_fails_alone() -> None:
    made = engine("reject=bad")
    bad, good = segment(made, scripted_audio("one"), prompt="a bad one"), segment(made, scripted_audio("two"))
    first, second = run(made, [bad, good])
    assert isinstance(first, SequenceFailed)
    assert first.sequence is bad
    assert isinstance(second, Final)
    assert second.text == "two"


def test_misbehaviour_once_is_over_when_its_file_exists(tmp_path: Path) -> None:
    once = tmp_path / "misbehaved"
    for attempt in range(2):
        made = engine(f"fail_at=1,once={once}")
        row = segment(made, scripted_audio("one"))
        if attempt == 0:
            with pytest.raises(EngineFailed):
                made.step([row], 0)
            assert once.exists()
        else:
            assert [getattr(event, "text", "") for event in run(made, [row])] == ["one"]


PROGRAM = """
    import sys
    from shared.messages import Lane
    from worker.engines.base import SequenceRequest
    from worker.engines.scripted import ScriptedEngine, ScriptedOptions, scripted_audio

    engine = ScriptedEngine(ScriptedOptions.parse(sys.argv[1]))
    engine.load(lambda phase, fraction: None)
    row = engine.open(SequenceRequest("a", Lane.BATCH, prompt=sys.argv[2]))
    engine.feed(row, scripted_audio("one two three"))
    engine.finish(row)
    while row.ready:
        print("step", flush=True)
        engine.step([row], 0)
    print("done", flush=True)
"""


def _process(spec: str, prompt: str = "") -> subprocess.Popen[str]:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), spec, prompt]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("spec", "prompt", "steps"), [("words=1,crash_at=2", "", 2), ("words=1,poison=bad", "a bad one", 1)]
)
def test_a_crash_is_a_crash(spec: str, prompt: str, steps: int) -> None:
    with _process(spec, prompt) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert output.split() == ["step"] * steps


def test_what_is_not_poisoned_lives() -> None:
    with _process("words=1,poison=bad", "a good one") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.split() == ["step"] * 3 + ["done"]


def test_a_stall_does_not_end() -> None:
    with _process("words=1,stall_at=2") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["step\n"] * 2
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.kill()
        assert process.stdout.read() == ""
