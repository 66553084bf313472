"""No part of the markup leaks, wherever the output is cut; streamed text only grows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.running import Reference
from worker.engines.qwen3.parse import OutputParser, scored_text
from worker.engines.qwen3.vocabulary import Vocabulary

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["trained_reference", "random_reference"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    reference: Reference = request.getfixturevalue(request.param)
    return Vocabulary(reference.processor.tokenizer.backend_tokenizer)


def tokens(v: Vocabulary, output: str) -> list[int]:
    before, tag, after = output.partition("<asr_text>")
    return [*v.encode(before), *([v.text_tag] if tag else []), *v.encode(after)]


def stream(v: Vocabulary, ids: list[int], *, forced: bool = False) -> tuple[list[str], OutputParser]:
    parser = OutputParser(v, forced=forced)
    seen = []
    for token in ids:
        parser.push(token)
        seen.append(parser.text)
    return seen, parser


@pytest.mark.parametrize(
    ("output", "language", "text"),
    [
        ("language English<asr_text>The weather is nice.", "en", "The weather is nice."),
        ("language Chinese<asr_text>今天天气很好。", "zh", "今天天气很好。"),
        ("language Klingon<asr_text>nuqneH", "", "nuqneH"),
        ("language Chinese,English<asr_text>你好 hello", "zh", "你好 hello"),
        ("language None<asr_text>", "", ""),
        ("language None<asr_text>Thank you.", "", ""),
        ("language", "", ""),
        ("language Chin", "", ""),
        ("language English", "", ""),
        ("language English\n", "", ""),
        ("", "", ""),
        ("Just words without a tag.", "", "Just words without a tag."),
        ("language is what we speak about here", "", "language is what we speak about here"),
        ("langoustine", "", "langoustine"),
        ("language English<asr_text>", "en", ""),
    ],
)
def test_parsing(vocabulary: Vocabulary, output: str, language: str, text: str) -> None:
    parser = OutputParser(vocabulary, forced=False).extend(tokens(vocabulary, output))
    assert (parser.language, parser.text) == (language, text)


OUTPUTS = [
    "language English<asr_text>They're 12 — naïve 🎙️ words, 東京.",
    "language Cantonese<asr_text>你好",
    "language None<asr_text>",
    "language English<asr_text>He said language English, twice.",
]


@pytest.mark.parametrize("output", OUTPUTS)
def test_cut_at_every_token(vocabulary: Vocabulary, output: str) -> None:
    text = "" if "None" in output else output.partition("<asr_text>")[2]
    seen, parser = stream(vocabulary, tokens(vocabulary, output))
    assert parser.text == text
    for part in seen:
        assert text.startswith(part), part
        assert "\ufffd" not in part
    assert [*seen, text] == sorted([*seen, text], key=len)


@pytest.mark.parametrize("markup", ["<asr_text>", "<|im_end|>", "<|audio_pad|>", "<timestamp>", "<|im_start|>"])
def test_spelled_out_markup_never_leaks(vocabulary: Vocabulary, markup: str) -> None:
    """Even if a model writes a tag letter by letter, and whether it comes as one token or as twenty."""
    spelled = [i for char in markup for i in vocabulary.encode(char)]
    ids = [*vocabulary.encode("one"), *spelled, vocabulary.text_tag, vocabulary.turn_end, *vocabulary.encode(" two")]
    seen, parser = stream(vocabulary, ids, forced=True)
    assert parser.text == "one two"
    for part in seen:
        assert "one two".startswith(part), part


def test_less_than_is_not_markup(vocabulary: Vocabulary) -> None:
    assert stream(vocabulary, vocabulary.encode("1 < 2 and 3 > 2"), forced=True)[1].text == "1 < 2 and 3 > 2"


def with_tags(v: Vocabulary, output: str) -> list[int]:
    first, *more = output.split("<asr_text>")
    return [*v.encode(first), *(token for part in more for token in (v.text_tag, *v.encode(part)))]


@pytest.mark.parametrize(
    ("output", "forced", "text"),
    [
        ("language English<asr_text>Hello there.", True, "Hello there."),
        ("language None<asr_text>", True, ""),
        ("language None<asr_text>Thank you.", True, ""),
        ("language English", True, ""),
        ("Hello there. language Chinese<asr_text>ni hao", True, "Hello there. ni hao"),
        ("language English<asr_text>Hello there. language Chinese<asr_text>ni hao", False, "Hello there. ni hao"),
        ("language Chinese<asr_text>你好。language English<asr_text>Hello.", False, "你好。 Hello."),
        ("language English<asr_text>language English<asr_text>Hello.", False, "Hello."),
        ("language English<asr_text>I speak the language Spanish", False, "I speak the language Spanish"),
        ("language English<asr_text>What a language", False, "What a language"),
        ("language matters", True, "language matters"),
        ("Hello<asr_text> there.", True, "Hello there."),
    ],
)
def test_language_lines_where_none_should_be(vocabulary: Vocabulary, output: str, forced: bool, text: str) -> None:
    ids = with_tags(vocabulary, output)
    parser = OutputParser(vocabulary, forced=forced)
    shown = [""]
    for token in ids:
        parser.push(token)
        shown.append(parser.text_so_far)
    assert parser.text == text
    assert all(after.startswith(before) for before, after in pairwise([*shown, parser.text])), shown
    assert not any("language English" in part or "language Chinese" in part or "None" in part for part in shown)


@pytest.mark.parametrize(
    ("output", "forced", "scored"),
    [
        ("language English<asr_text>Hello there.", False, "Hello there."),
        ("language English<asr_text>Hello there.", True, "Hello there."),
        ("language English<asr_text>Hello there. language Chinese<asr_text>ni hao", False, "Hello there. ni hao"),
        ("language None<asr_text>Thank you.", False, ""),
        ("language None<asr_text>Thank you.", True, ""),
        ("language English", True, ""),
        ("language Engl", False, ""),
        ("今天天气很好。", True, "今天天气很好。"),
        ("Hello <|im_end|> there", True, ""),
    ],
)
def test_scores_spell_the_text_or_there_are_none(
    vocabulary: Vocabulary, output: str, forced: bool, scored: str
) -> None:
    """What is taken out of the text is not told with its scores."""
    ids = with_tags(vocabulary, output) if "|" not in output else [vocabulary.encode(c)[0] for c in output]
    parser = OutputParser(vocabulary, forced=forced).extend(ids)
    found = parser.scored([-1.0] * len(ids), parser.text)
    assert "".join(characters for characters, _ in found).strip() == scored
    assert -sum(score for _, score in found) == (len(parser.spoken) if scored else 0)


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("cut", ["language", "language ", "language Ch", "language Chinese", "language Chinese,Eng"])
def test_a_line_whose_tag_was_cut_off_does_not_stay(vocabulary: Vocabulary, forced: bool, cut: str) -> None:
    before = "" if forced else "language English<asr_text>"
    ids = with_tags(vocabulary, f"{before}Hello there. {cut}")
    parser = OutputParser(vocabulary, forced=forced).extend(ids)
    assert parser.text_if_cut == "Hello there."
    assert (
        "".join(characters for characters, _ in parser.scored([0.0] * len(ids), parser.text_if_cut)) == "Hello there."
    )


@pytest.mark.parametrize("said", ["We speak a language", "my language lessons", "tra la la"])
def test_what_is_cut_keeps_other_words(vocabulary: Vocabulary, said: str) -> None:
    kept = said.removesuffix(" language")
    assert OutputParser(vocabulary, forced=True).extend(vocabulary.encode(said)).text_if_cut == kept.rstrip()


def test_a_stray_byte_takes_no_scores_along() -> None:
    pieces = [(b"Hi", -1.0), (b"\xff", -2.0), (b" th", -3.0), ("é".encode()[:1], -4.0), ("é".encode()[1:], -5.0)]
    assert scored_text(pieces) == (("Hi", -1.0), ("\ufffd", -2.0), (" th", -3.0), ("é", -9.0))


@given(st.lists(st.integers(0, 1007), max_size=60), st.booleans())
@settings(max_examples=150, deadline=None)
def test_scores_of_any_tokens_spell_the_text_or_are_none(
    vocabulary_1008: Vocabulary, ids: list[int], forced: bool
) -> None:
    parser = OutputParser(vocabulary_1008, forced=forced).extend(ids)
    found = "".join(characters for characters, _ in parser.scored([0.0] * len(ids), parser.text))
    assert found.strip() in (parser.text, "")


@given(st.lists(st.integers(0, 1007), max_size=60), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens(vocabulary_1008: Vocabulary, ids: list[int], forced: bool) -> None:
    seen, _parser = stream(vocabulary_1008, ids, forced=forced)
    for part in seen:
        assert not any(markup in part for markup in vocabulary_1008.added_texts)


@pytest.fixture(scope="module")
def vocabulary_1008(trained_reference: Reference) -> Vocabulary:
    return Vocabulary(trained_reference.processor.tokenizer.backend_tokenizer)
