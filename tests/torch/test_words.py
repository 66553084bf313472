"""Words and the units in them: those of transformers' processor, and nothing of the text lost."""

from __future__ import annotations

import subprocess
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.torch.checkpoints import build_aligner
from tests.torch.running import hugging
from worker.engines.qwen3.japanese import origins_of_normalized
from worker.engines.qwen3.words import split_words

pytestmark = pytest.mark.torch

Split = Callable[[str, str], list[str]]
NAMES = {"en": "English", "zh": "Chinese", "ja": "Japanese", "ko": "Korean"}
ANALYSERS = {"ja": "nagisa", "ko": "soynlp"}
TEXTS = [
    "",
    " \n",
    "。、！？…「」",
    "— ... !",
    "今日は「良い」天気ですね。明日、東京へ行きます！",
    "OpenAIのGPT-4は3.14と１２，５００円、don't panic (笑)。",
    " 「はい」と言った。 ２０２４年10月⑩日に㈱山田の㌔とｶﾞｷﾞ、か\u3099き ﬁ",
    "Hello World、これは test です 👍👨\u200d👩\u200d👧 𠮟る 々〆 ー",
    "오늘은 날씨가 정말 좋습니다. 그렇죠?",
    "GPT-4는 3.14와 12,500원, don't 大韓民國에서 '인용' 5G폰을 샀다ㅋㅋ!",
    "「한국어」 (테스트) 日本語 안녕, 2024년10월.",
    "The U.S. — don't “quote” it (now)... 今天,天气好。OK吧 “你好”，世界",
    " 'tis ' a ''b'' ",
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Split:
    processor = hugging.AutoProcessor.from_pretrained(build_aligner(tmp_path_factory.mktemp("words") / "native"))

    def split(text: str, language: str) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # soynlp's and scipy's own, on import
            units: list[str] = processor.split_words_for_alignment(text, NAMES[language])
        return units

    return split


def units_of(text: str, language: str) -> list[str]:
    return [unit for word in split_words(text, language) for unit in word.units]


def shown(text: str, language: str) -> list[str]:
    return [word.shown for word in split_words(text, language)]


def assert_nothing_lost(text: str, language: str) -> None:
    joined = "".join("".join(shown(text, language)).split())
    assert joined == ("".join(text.split()) if units_of(text, language) else "")


@pytest.mark.parametrize("language", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_units_are_those_of_transformers(reference: Split, text: str, language: str) -> None:
    if language in ANALYSERS:
        pytest.importorskip(ANALYSERS[language])
    assert units_of(text, language) == reference(text, language)
    assert_nothing_lost(text, language)


@pytest.mark.parametrize("language", NAMES)
def test_any_text(reference: Split, language: str) -> None:
    if language in ANALYSERS:
        pytest.importorskip(ANALYSERS[language])

    @given(st.text(st.one_of(st.characters(), st.sampled_from("'.,(「」 \u3000あアｱﾞ今가ᄀa1①㌔\u3099")), max_size=30))
    @settings(max_examples=150, deadline=None)
    def check(text: str) -> None:
        assert units_of(text, language) == reference(text, language)
        assert_nothing_lost(text, language)

    check()


@given(st.text(st.one_of(st.characters(), st.sampled_from("a\u0323\u0307가ᄀ각ᆨﾞｶか\u3099゛ﬁ㌔ΐ")), max_size=12))
@settings(max_examples=500)
@example("q\u0307\u0323a")
def test_characters_of_the_normal_form_know_where_they_come_from(text: str) -> None:
    origins = origins_of_normalized(text)
    parts = list(dict.fromkeys(origins))
    assert "".join(text[start:end] for start, end in parts) == text
    form = ((unicodedata.normalize("NFKC", text[start:end]), (start, end)) for start, end in parts)
    pairs = [(char, span) for part, span in form for char in part]
    assert "".join(char for char, _ in pairs) == unicodedata.normalize("NFKC", text)
    assert [span for _, span in pairs] == origins


def test_shown() -> None:
    assert shown("Don't stop, (now)!", "en") == ["Don't", "stop,", "(now)!"]
    assert shown("今天,天气好。OK 吧“你好”", "zh") == ["今", "天,", "天", "气", "好。", "OK", "吧", "“你", "好”"]
    assert shown("a — b", "en") == ["a—", "b"]
    assert shown("… — a ( b", "en") == ["…—a(", "b"]
    assert shown("오늘은 「좋다」. 3.5원 大韓民國", "ko") == ["오늘은", "「좋다」.", "3.5원", "大韓民國"]


def test_shown_in_japanese() -> None:
    pytest.importorskip("nagisa")
    assert shown("今日は「良い」天気。", "ja") == ["今日", "は", "「良い」", "天気。"]
    # Read in many units, shown as one word; full-width and circled digits stay as they were written.
    assert shown("3.14 と don't、１０，５００円 ⑩", "ja") == ["3.14", "と", "don't、", "１０，５００", "円", "⑩"]
    assert split_words("⑩", "ja")[0].units == ("1", "0")


def test_a_long_run_of_marks_is_read_at_once() -> None:
    text = "か" + "\u3099" * 20_000 + "き"
    begun = time.perf_counter()
    origins = origins_of_normalized(text)
    # Quadratic time would be some 10 s.
    assert time.perf_counter() - begun < 2.0
    assert set(origins) == {(0, 20_001), (20_001, 20_002)}


@pytest.mark.parametrize(("language", "word"), [("ja", "東京へ行きました。"), ("ko", "대한민국에서는")])
def test_long_text_is_split_at_once(reference: Split, language: str, word: str) -> None:
    pytest.importorskip(ANALYSERS[language])
    text = " ".join([word] * 1000)
    expected = reference(text, language)
    begun = time.perf_counter()
    units = units_of(text, language)
    assert time.perf_counter() - begun < 2.0
    assert units == expected
    assert len(units) >= 1000


def test_loading_the_analyser_leaves_the_process_as_it_was() -> None:
    """In a process of its own, where warnings are errors: no print, no handler of the root log, no path, no thread."""
    pytest.importorskip("nagisa")
    program = """
import logging, sys, warnings, torch
from worker.engines.qwen3.words import prepare, split_words
def state():
    return sys.path, torch.get_num_threads(), warnings.filters, logging.root.handlers, logging.root.level
assert "nagisa" not in sys.modules
warnings.simplefilter("error")
before = [list(part) if isinstance(part, list) else part for part in state()]
split_words("안녕", "ko")
assert "soynlp" not in sys.modules and "nagisa" not in sys.modules
prepare("ja")
assert "nagisa" in sys.modules and list(state()) == before
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
