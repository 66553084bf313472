"""The forced aligner: the classes of transformers, and times that a subtitle can use whatever the classes are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import AudioTooLong
from tests.torch.checkpoints import build_aligner
from tests.torch.running import drive, finals, hugging, loaded, noise, read_audio, start, transcribe
from worker.engines.qwen3 import device
from worker.engines.qwen3.aligner import ForcedAligner, _longest_rising, place, repair, split_words

pytestmark = pytest.mark.torch

TEXT = "The weather is nice today, so we'll walk — slowly — to the station."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_aligner(tmp_path_factory.mktemp("aligner") / "native")


@pytest.fixture(scope="module")
def aligner(folder: Path) -> ForcedAligner:
    return ForcedAligner(str(folder), device.set_up("cpu", dtype=torch.float32, threads=1), lambda *_: None)


@pytest.mark.parametrize("seconds", [0.3, 4.0, 9.3])
def test_classes_equal_transformers(folder: Path, aligner: ForcedAligner, seconds: float) -> None:
    processor = hugging.AutoProcessor.from_pretrained(folder)
    model = hugging.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    clip = noise(seconds, seed=2)
    inputs, words = processor.prepare_forced_aligner_inputs(audio=[clip], transcript=[TEXT], language="English")
    with torch.inference_mode():
        chosen = model(**inputs).logits.argmax(-1)[inputs["input_ids"] == model.config.timestamp_token_id]
    spoken = [word.spoken for word in split_words(TEXT)]
    assert spoken == words[0]
    assert aligner.classes(clip, spoken) == chosen.tolist()
    assert len(set(chosen.tolist())) > 2


def test_times_of_words(aligner: ForcedAligner) -> None:
    clip = noise(4.0)
    times = aligner.align(clip, TEXT)
    assert " ".join(word.text for word in times) == TEXT.replace(" — ", "— ")
    _assert_usable([(word.start, word.end) for word in times], 4.0)
    assert aligner.align(clip, "") == aligner.align(clip, "…!") == ()
    with pytest.raises(AudioTooLong):
        aligner.align(noise(181.0), TEXT)


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


def test_splitting() -> None:
    def both(text: str) -> list[tuple[str, str]]:
        return [(word.shown, word.spoken) for word in split_words(text)]

    assert both("Don't stop, (now)!") == [("Don't", "Don't"), ("stop,", "stop"), ("(now)!", "now")]
    assert both("今天,天气好。OK 吧") == [
        ("今", "今"),
        ("天,", "天"),
        ("天", "天"),
        ("气", "气"),
        ("好。", "好"),
        ("OK", "OK"),
        ("吧", "吧"),
    ]
    assert both("a — b") == [("a—", "a"), ("b", "b")]


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
    words = split_words(" ".join(f"w{n}" for n in range(len(classes) // 2)))
    times = place(words, repair([k * 0.08 for k in classes]), duration)
    _assert_usable([(word.start, word.end) for word in times], duration)


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
