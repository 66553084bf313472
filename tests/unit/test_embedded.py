"""Moonshine through its C interface: how well it hears, what it makes of bad audio, and how it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import EngineFailed, ModelLoadFailed
from shared.messages import Lane
from tests.speech import DATA, NAMES, clip, recital, transcripts, word_errors, words
from worker.audio.samples import Audio
from worker.cores import usable_cores
from worker.engines import embedded
from worker.engines.base import EngineEvent, Final, Hypothesis, SequenceFailed, SequenceRequest
from worker.engines.embedded import EmbeddedEngine, EmbeddedSequence

HANG_GUARD = 3
"""Times the figure of the design."""
COLD_START_S = 2.0
"""The design's: stopped worker to transcript of a 3 s clip."""


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(threads=1)
    made.load(_nothing)
    yield made
    made.close()


def _nothing(phase: str, fraction: float) -> None: ...


def segment(engine: EmbeddedEngine, audio: Audio, lane: Lane = Lane.BATCH) -> EmbeddedSequence:
    row = engine.open(SequenceRequest("a", lane))
    engine.feed(row, audio.astype(np.float32))
    engine.finish(row)
    return row


def end(engine: EmbeddedEngine, audio: Audio) -> EngineEvent:
    (event,) = engine.step([segment(engine, audio)], 0)
    return event


def hear(engine: EmbeddedEngine, audio: Audio) -> str:
    event = end(engine, audio)
    assert isinstance(event, Final)
    return event.text


def error_rate(engine: EmbeddedEngine, clips: dict[str, Audio]) -> float:
    errors = sum(word_errors(transcripts()[name], hear(engine, audio)) for name, audio in clips.items())
    return errors / sum(len(words(transcripts()[name])) for name in clips)


# ---------------------------------------------------------------- hearing


def test_word_errors_on_human_speech(engine: EmbeddedEngine) -> None:
    """1 word of 92 when this was written."""
    assert error_rate(engine, {name: clip(name) for name in NAMES}) <= 0.04


def test_text_has_case_and_punctuation(engine: EmbeddedEngine) -> None:
    assert hear(engine, clip("librivox-0930")) == transcripts()["librivox-0930"]


@pytest.mark.parametrize("peak", [-20, -40], ids="{} dBFS".format)
def test_quiet_speech_needs_no_gain(engine: EmbeddedEngine, peak: int) -> None:
    names = ("librivox-0890", "librivox-0920", "librivox-0930")
    quiet = {name: clip(name) / np.abs(clip(name)).max() * 10 ** (peak / 20) for name in names}
    rounded: dict[str, Audio] = {n: (np.round(audio * 32768) / 32768).astype(np.float32) for n, audio in quiet.items()}
    assert error_rate(engine, rounded) <= 0.05


@pytest.mark.parametrize(("peak", "heard"), [(8.0, 1.0), (1.0, 1.0), (0.01, 0.01)])
def test_only_audio_over_full_scale_is_divided_by_its_peak(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, peak: float, heard: float
) -> None:
    decoder = engine._decoders[0]
    decode, peaks = decoder.decode, []

    def watched(audio: Audio) -> str:
        peaks.append(float(np.abs(audio).max()))
        return decode(audio)

    monkeypatch.setattr(decoder, "decode", watched)
    audio = clip("librivox-0930")
    assert hear(engine, audio / np.abs(audio).max() * np.float32(peak)) == transcripts()["librivox-0930"]
    assert peaks == [pytest.approx(heard)]


@pytest.mark.slow
def test_segments_up_to_the_bound(engine: EmbeddedEngine) -> None:
    audio, said = recital(1, [0.3], names=NAMES[:4])
    assert 20 < len(audio) / 16_000 < embedded.MAX_AUDIO_S
    assert word_errors(said, hear(engine, audio)) <= 4


# ---------------------------------------------------------------- bad audio


@pytest.mark.parametrize("seconds", [0.0001, 0.01, 0.032, 0.064, 0.1, 0.3])
def test_short_audio_is_no_error(engine: EmbeddedEngine, seconds: float) -> None:
    text = hear(engine, clip("jfk")[8000 : 8000 + round(seconds * 16_000)])
    assert (text == "") is (seconds < 0.1)
    assert len(text.split()) <= 2


def test_rounding_noise_is_not_heard(engine: EmbeddedEngine) -> None:
    """It would say "You" to silence, and dream on the last bit of 16."""
    assert hear(engine, np.zeros(32_000, np.float32)) == ""
    noise: Audio = (np.random.default_rng(0).integers(-2, 3, 32_000) / 32768).astype(np.float32)
    assert hear(engine, noise) == ""


def test_music_is_no_text(engine: EmbeddedEngine) -> None:
    """A constant offset makes it write notes."""
    assert hear(engine, np.full(80_000, 0.5, np.float32)) == ""


def test_run_aways_are_cut_and_told(engine: EmbeddedEngine) -> None:
    """Faint noise makes it say "The first is the first is …" until its budget is spent."""
    events = [end(engine, np.random.default_rng(seed).normal(0, 0.001, 80_000).astype(np.float32)) for seed in range(4)]
    finals = [event for event in events if isinstance(event, Final)]
    assert len(finals) == 4
    assert any(final.finish_reason == "repetition" for final in finals)
    assert all(len(final.text.split()) <= 8 for final in finals)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_audio_that_is_no_numbers_fails(engine: EmbeddedEngine, value: float) -> None:
    audio = clip("librivox-0930").copy()
    audio[1000] = value
    event = end(engine, audio)
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, EngineFailed)


def test_a_segment_without_end_is_refused(engine: EmbeddedEngine) -> None:
    event = end(engine, np.tile(clip("jfk"), 3))
    assert isinstance(event, SequenceFailed)
    assert "30 s" in event.error.message


def test_an_error_of_the_library_fails_the_row(engine: EmbeddedEngine, capfd: pytest.CaptureFixture[str]) -> None:
    """A handle that it does not know."""
    decoder = engine._decoders[0]
    decoder._handle, known = 12_345, decoder._handle
    try:
        event = end(engine, clip("librivox-0930"))
    finally:
        decoder._handle = known
    assert isinstance(event, SequenceFailed)
    assert "Invalid handle" in event.error.message
    assert hear(engine, clip("librivox-0930")) == transcripts()["librivox-0930"]


# ---------------------------------------------------------------- hypotheses


def _live(engine: EmbeddedEngine) -> EmbeddedSequence:
    return engine.open(SequenceRequest("a", Lane.LIVE, partials=True))


@pytest.mark.parametrize(("quiet", "needed"), [(0, 7_680), (3_200, 10_880), (4_800, 12_480), (9_600, 12_800)])
def test_the_first_hypothesis_comes_after_half_a_second_of_speech(
    engine: EmbeddedEngine, quiet: int, needed: int
) -> None:
    """Pre-roll is silence or not; and however it looks, after 0.8 s it comes."""
    row = _live(engine)
    speech = clip("librivox-0930")[8_000:]
    sound = np.concatenate([np.zeros(quiet, np.float32), speech])
    engine.feed(row, sound[: needed - 1])
    assert not row.ready
    engine.feed(row, sound[needed - 1 : needed])
    assert [row.ready] == [True]


def test_a_pause_is_heard_at_once_and_the_final_needs_no_decode(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = engine.open(SequenceRequest("a", Lane.LIVE))
    engine.feed(row, clip("librivox-0930"))
    assert not row.ready
    engine.pause(row)
    assert [row.ready] == [True]
    assert engine.step([row], 0) == [], "nobody reads along"
    engine.finish(row)
    monkeypatch.setattr(engine._decoders[0], "decode", None)
    (final,) = engine.step([row], 0)
    assert isinstance(final, Final)
    assert final.text == transcripts()["librivox-0930"]


def test_hypotheses_leave_time_for_others(engine: EmbeddedEngine) -> None:
    """The next one waits for three times the last decode of new audio, however fast or slow the machine is."""
    row = _live(engine)
    engine.feed(row, clip("jfk")[:80_000])
    began = time.monotonic_ns()
    (event,) = engine.step([row], 0)
    took = (time.monotonic_ns() - began) / 1e9
    assert isinstance(event, Hypothesis)
    assert "fellow Americans" in event.text
    assert row.pace == pytest.approx(max(5120, 3 * took * 16_000), rel=0.25)
    engine.feed(row, clip("jfk")[80_000 : 80_000 + row.pace - 1])
    assert [row.ready] == [False]
    engine.feed(row, clip("jfk")[-1:])
    assert [row.ready] == [True]


def test_what_was_heard_to_the_end_is_not_decoded_again(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _live(engine)
    engine.feed(row, clip("librivox-0930"))
    (hypothesis,) = engine.step([row], 0)
    engine.finish(row)
    monkeypatch.setattr(engine._decoders[0], "decode", None)
    (final,) = engine.step([row], 0)
    assert isinstance(hypothesis, Hypothesis)
    assert isinstance(final, Final)
    assert final.text == hypothesis.text == transcripts()["librivox-0930"]


# ---------------------------------------------------------------- several decoders


def test_one_decoder_takes_one_row(engine: EmbeddedEngine) -> None:
    rows = [segment(engine, clip("librivox-0930")[:16_000]) for _ in range(2)]
    assert [event.sequence is rows[0] for event in engine.step(rows, 0)] == [True]
    assert rows[1].ready
    engine.cancel(rows[1])


def test_rows_of_a_lower_lane_do_not_hold_up_the_first() -> None:
    made = EmbeddedEngine(threads=2)
    capabilities = made.load(_nothing)
    assert (capabilities.max_batch, capabilities.max_live) == (2, 6)
    live = segment(made, clip("librivox-0930")[:16_000], Lane.LIVE)
    files = [segment(made, clip("librivox-0930")) for _ in range(2)]
    assert [event.sequence is live for event in made.step([live, *files], 0)] == [True]
    assert len(made._decoders) == 1  # the second is loaded when it is needed
    texts = [event.text for event in made.step(files, 0) if isinstance(event, Final)]
    assert texts == [transcripts()["librivox-0930"]] * 2
    made.close()


@pytest.mark.parametrize(("threads", "batch"), [(1, 1), (3, 3), (64, embedded.MAX_DECODERS)])
def test_threads_bound_the_rows_of_a_step(threads: int, batch: int) -> None:
    assert EmbeddedEngine(threads=threads)._limit == batch


def test_cores_are_those_that_the_process_may_use() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_a_closed_engine_says_so() -> None:
    made = EmbeddedEngine()
    with pytest.raises(EngineFailed, match="not loaded"):
        made.step([segment(made, clip("librivox-0930"))], 0)


# ---------------------------------------------------------------- the package


def test_the_same_text_as_the_packages_own_class(engine: EmbeddedEngine) -> None:
    from moonshine_voice.moonshine_api import ModelArch
    from moonshine_voice.transcriber import Transcriber
    from moonshine_voice.utils import get_model_path

    package: Any = Transcriber(get_model_path("tiny-en"), ModelArch.TINY, options=dict(embedded._OPTIONS))
    audio = clip("librivox-0890")
    padded = np.concatenate([audio, np.zeros(-len(audio) % embedded._HOP, np.float32)])
    lines = package.transcribe_without_streaming(padded.tolist()).lines
    package.close()
    assert hear(engine, audio) == " ".join(line.text for line in lines)


def test_our_structures_are_the_packages() -> None:
    import ctypes

    from moonshine_voice.moonshine_api import MOONSHINE_HEADER_VERSION, ModelArch, TranscriptC, TranscriptLineC

    assert ctypes.sizeof(embedded._Line) == ctypes.sizeof(TranscriptLineC)
    assert ctypes.sizeof(embedded._Transcript) == ctypes.sizeof(TranscriptC)
    assert embedded._Transcript.count.offset == TranscriptC.line_count.offset
    assert TranscriptLineC.text.offset == 0
    assert (embedded._ABI, embedded._TINY) == (MOONSHINE_HEADER_VERSION, ModelArch.TINY)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """The library is looked for anew."""
    embedded._library.cache_clear()
    yield
    embedded._library.cache_clear()


def _load_fails(words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words) as caught:
        EmbeddedEngine().load(_nothing)
    assert "pip install 'napscribe[embedded]'" in caught.value.hint


@pytest.mark.usefixtures("fresh_library")
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moonshine_voice", None)
    _load_fails("not installed")


def _fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *, model: bool) -> Path:
    package = folder / "moonshine_voice"
    (package / "assets" / "tiny-en" if model else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "moonshine_voice", raising=False)
    monkeypatch.syspath_prepend(folder)
    return package


@pytest.mark.usefixtures("fresh_library")
def test_a_package_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_package(tmp_path, monkeypatch, model=False)
    _load_fails("does not bring its model")


@pytest.mark.usefixtures("fresh_library")
def test_a_library_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (_fake_package(tmp_path, monkeypatch, model=True) / "libmoonshine.so").write_bytes(b"\x7fELF of another world")
    _load_fails("does not load on this machine")


@pytest.mark.usefixtures("fresh_library")
def test_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = embedded._library()[0]._name
    embedded._library.cache_clear()
    (_fake_package(tmp_path, monkeypatch, model=True) / "libmoonshine.so").symlink_to(library)
    _load_fails("cannot load")


# ---------------------------------------------------------------- the start

COLD_START = """
    import os, sys, wave
    import numpy as np
    from shared.messages import Lane
    from worker.engines.base import SequenceRequest
    from worker.engines.embedded import EmbeddedEngine

    with wave.open(sys.argv[1]) as file:
        audio = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    engine = EmbeddedEngine(threads=1)
    engine.load(lambda phase, fraction: None)
    row = engine.open(SequenceRequest("a", Lane.BATCH))
    engine.feed(row, audio)
    engine.finish(row)
    print(engine.step([row], 0)[0].text)
    print(len(os.listdir("/proc/self/task")), "requests" in sys.modules, "torch" in sys.modules)
"""


def _python(program: str, *arguments: str) -> Sequence[str]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    return result.stdout.splitlines()


def test_cold_start_to_the_transcript_of_a_short_clip() -> None:
    began = time.monotonic()
    text, facts = _python(COLD_START, str(DATA / "librivox-0880.wav"))
    assert time.monotonic() - began < HANG_GUARD * COLD_START_S
    assert word_errors(transcripts()["librivox-0880"], text) <= 1
    assert facts == "1 False False"  # no thread beside ours, and nothing heavy imported
