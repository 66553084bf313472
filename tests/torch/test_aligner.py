"""The forced aligner: the classes of transformers, and times that a subtitle can use whatever the classes are."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gateway.answers.timed_text import timed_tokens
from shared.errors import AudioTooLong, ModelLoadFailed
from shared.messages import SegmentDone, Word
from tests.torch.checkpoints import build_aligner, to_original_layout
from tests.torch.running import drive, finals, hugging, loaded, noise, read_audio, start, transcribe
from worker.engines.qwen3 import device, japanese
from worker.engines.qwen3.aligner import ForcedAligner, _longest_rising, place, repair
from worker.engines.qwen3.words import AlignedText, split_words

pytestmark = pytest.mark.torch

TEXT = "The weather is nice today, so we'll walk — slowly — to the station."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_aligner(tmp_path_factory.mktemp("aligner") / "native")


@pytest.fixture(scope="module")
def aligner(folder: Path) -> ForcedAligner:
    return ForcedAligner(str(folder), device.set_up("cpu", dtype=torch.float32, threads=1), lambda *_: None)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "not a number", "whole numbers"])
def test_weights_that_are_no_good_are_refused_by_name(folder: Path, tmp_path: Path, fault: str) -> None:
    """Else it would give times, told as exact, that mean nothing."""
    shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    key = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    if fault == "missing":
        del weights[key]
    elif fault == "unexpected":
        weights["one_more.weight"] = weights[key].clone()
    elif fault == "not a number":
        weights[key][3, 5] = torch.nan
    else:
        weights[key] = weights[key].int()
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed) as caught:
        ForcedAligner(str(tmp_path / "broken"), device.set_up("cpu", dtype=torch.float32, threads=1), lambda *_: None)
    assert ("one_more" if fault == "unexpected" else key) in caught.value.message
    assert caught.value.hint


def test_what_is_no_aligner_is_told_with_the_setting_that_named_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(ModelLoadFailed) as caught:
        ForcedAligner(str(tmp_path), device.set_up("cpu", dtype=torch.float32, threads=1), lambda *_: None)
    assert "NAPSCRIBE_ALIGNER" in caught.value.hint


def test_the_original_layout_says_the_same(folder: Path, tmp_path: Path, aligner: ForcedAligner) -> None:
    old = to_original_layout(folder, tmp_path / "old")
    heard = ForcedAligner(str(old), device.set_up("cpu", dtype=torch.float32, threads=1), lambda *_: None)
    clip = noise(4.0, seed=2)
    assert heard.classes(clip, ["The", "weather"]) == aligner.classes(clip, ["The", "weather"])


@pytest.mark.parametrize("seconds", [0.3, 4.0, 9.3])
def test_classes_equal_transformers(folder: Path, aligner: ForcedAligner, seconds: float) -> None:
    processor = hugging.AutoProcessor.from_pretrained(folder)
    model = hugging.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    clip = noise(seconds, seed=2)
    inputs, words = processor.prepare_forced_aligner_inputs(audio=[clip], transcript=[TEXT], language="English")
    with torch.inference_mode():
        chosen = model(**inputs).logits.argmax(-1)[inputs["input_ids"] == model.config.timestamp_token_id]
    spoken = [unit for word in split_words(TEXT, "en") for unit in word.units]
    assert spoken == words[0]
    assert aligner.classes(clip, spoken) == chosen.tolist()
    assert len(set(chosen.tolist())) > 2


def test_times_of_words(aligner: ForcedAligner) -> None:
    clip = noise(4.0)
    times = aligner.align(clip, TEXT, "en")
    assert " ".join(word.text for word in times) == TEXT.replace(" — ", "— ")
    _assert_usable([(word.start, word.end) for word in times], 4.0)
    assert aligner.align(clip, "", "en") == aligner.align(clip, "…!", "en") == ()
    with pytest.raises(AudioTooLong):
        aligner.align(noise(181.0), TEXT, "en")


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("ja", "今日は「GPT-4」の話です。値段は3,500円、１０％引きでした！"),
        ("ko", "오늘은 GPT-4 이야기입니다. 가격은 3,500원, 10% 할인했어요!"),
    ],
)
def test_japanese_and_korean(aligner: ForcedAligner, language: str, text: str) -> None:
    if language == "ja":
        pytest.importorskip("nagisa")
    words = aligner.align(noise(5.0), text, language)
    assert ("" if language == "ja" else " ").join(word.text for word in words) == text
    assert len(words) > 5
    # Subtitles find the same letters, so they take these times and the text as it is.
    timed = tuple(Word(word.text, word.start, word.end) for word in words)
    segment = SegmentDone(1, "r", 0, 0, 80_000, 80_000, text, words=timed)
    tokens = timed_tokens(segment, glued=False, max_width=42)
    assert "".join(token.text if token.glued else f" {token.text}" for token in tokens).strip() == text
    ends = {token.end for token in tokens}
    assert {round(word.end * 1000) for word in words} <= ends
    _assert_usable([(word.start, word.end) for word in words], 5.0)


def test_a_word_of_several_units_lasts_from_the_first_to_the_last() -> None:
    words = [AlignedText("3.5", ("3", "5")), AlignedText("円", ("円",))]
    times = place(words, [0.0, 0.4, 0.8, 1.2, 1.2, 1.6], 2.0)
    assert [(word.text, word.start, word.end) for word in times] == [("3.5", 0.0, 1.2), ("円", 1.2, 1.6)]


def test_engine_gives_exact_times_where_they_are_asked_for(folder: Path, trained: Path) -> None:
    engine = loaded(trained, max_slots=2, aligner=str(folder))
    clip = read_audio(trained / "samples" / "flite-rms.wav")
    rows = [start(engine, clip, str(n), language="en", words=n < 2) for n in range(3)]
    done = finals(drive(engine, rows))
    for n in range(3):
        assert done[str(n)].text == "I would like to book a table for two people at eight."
    assert not done["2"].words
    for n in range(2):
        assert [word.text for word in done[str(n)].words] == done[str(n)].text.split()
        _assert_usable([(word.start, word.end) for word in done[str(n)].words], len(clip) / 16_000)
    engine.close()


def test_without_an_aligner_that_loads_there_are_words_without_times(trained: Path, tmp_path: Path) -> None:
    engine = loaded(trained, max_slots=1, aligner=str(tmp_path))
    final = transcribe(engine, read_audio(trained / "samples" / "flite-rms.wav"), language="en", words=True)
    assert final.text
    assert final.words == ()
    engine.close()


def test_without_the_analyser_words_have_no_times_and_the_journal_says_once_what_to_install(
    folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """None in ``sys.modules`` is how Python itself marks a module that cannot be imported."""
    monkeypatch.setitem(sys.modules, "nagisa", None)
    japanese.load.cache_clear()
    engine = loaded(trained, max_slots=2, aligner=str(folder))
    clip = read_audio(trained / "samples" / "flite-rms.wav")
    capfd.readouterr()
    done = finals(drive(engine, [start(engine, clip, str(n), language="ja", words=True) for n in range(3)]))
    assert [(bool(final.text), final.words) for final in done.values()] == [(True, ())] * 3
    assert capfd.readouterr().err.count("napscribe[aligner]") == 1
    assert transcribe(engine, clip, language="en", words=True).words
    engine.close()


def test_an_analyser_that_is_broken_is_as_one_that_is_missing(
    folder: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A package that is found but raises on import, as one built for another numpy does."""
    package = tmp_path / "nagisa"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys\nsys.path.append(__path__[0])\nraise ValueError('numpy.dtype size')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nagisa", raising=False)
    japanese.load.cache_clear()
    path = sys.path[:]
    engine = loaded(trained, max_slots=2, aligner=str(folder))
    clip = read_audio(trained / "samples" / "flite-rms.wav")
    capfd.readouterr()
    done = finals(drive(engine, [start(engine, clip, str(n), language="ja", words=True) for n in range(2)]))
    assert [(bool(final.text), final.words) for final in done.values()] == [(True, ())] * 2
    assert capfd.readouterr().err.count("numpy.dtype size") == 1
    assert sys.path == path
    engine.close()


@given(st.lists(st.integers(0, 40), max_size=60))
def test_longest_run_is_longest(values: list[int]) -> None:
    best = [0] * len(values)
    for n, value in enumerate(values):
        best[n] = 1 + max((best[k] for k in range(n) if values[k] <= value), default=0)
    chain = _longest_rising(values)
    assert len(chain) == max(best, default=0)
    assert [values[n] for n in chain] == sorted(values[n] for n in chain)


@given(st.integers(1, 60).flatmap(lambda n: st.lists(st.integers(0, 4999), min_size=2 * n, max_size=2 * n)), st.data())
@settings(max_examples=150)
def test_any_classes_give_usable_times(classes: list[int], data: st.DataObject) -> None:
    duration = data.draw(st.floats(0.05, 180.0))
    units = [f"w{n}" for n in range(len(classes) // 2)]
    words = [AlignedText("".join(of_word), tuple(of_word)) for of_word in _cut(units, data)]
    times = place(words, repair([k * 0.08 for k in classes]), duration)
    _assert_usable([(word.start, word.end) for word in times], duration)


def _cut(units: list[str], data: st.DataObject) -> list[list[str]]:
    """Units as words of one or more."""
    words = [[units[0]]]
    for unit in units[1:]:
        if data.draw(st.booleans()):
            words.append([unit])
        else:
            words[-1].append(unit)
    return words


def _assert_usable(times: list[tuple[float, float]], duration: float) -> None:
    reached = 0.0
    for begun, ended in times:
        assert reached - 1e-9 <= begun < ended <= duration + 1e-9
        reached = ended


def test_good_times_stay_and_outliers_move_between_their_neighbours() -> None:
    assert repair([0.0, 1.0, 1.0, 2.0]) == [0.0, 1.0, 1.0, 2.0]
    assert repair([0.0, 1.0, 9.0, 2.0, 3.0]) == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert repair([0.0, 8.0, 9.0, 7.0, 4.0, 5.0, 6.0, 7.0])[1:4] == [1.0, 2.0, 3.0]


def test_repair_is_fast_on_long_texts() -> None:
    values = [float((n * 7919) % 10_007) for n in range(40_000)]
    begun = time.perf_counter()
    repair(values)
    # A quadratic one would take minutes.
    assert time.perf_counter() - begun < 5.0
