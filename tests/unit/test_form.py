"""Fields of a form as the SDKs and other clients send them, and what each wrong one is told."""

from __future__ import annotations

from typing import get_args

import pytest
from openai.types import AudioModel

from gateway.files.form import MAX_KEYWORDS, MODEL_ALIASES, TranscriptionRequest, parse_request, resolve_model
from shared import errors
from shared.messages import RawAudio


def parse(**fields: str | list[str]) -> TranscriptionRequest:
    """Names are spelled with ``__`` for ``[]``."""
    named = ((name.replace("__", "[]"), value) for name, value in fields.items())
    return parse_request({name: [value] if isinstance(value, str) else value for name, value in named})


def refusal(**fields: str | list[str]) -> errors.BadRequest:
    with pytest.raises(errors.BadRequest) as caught:
        parse(**fields)
    return caught.value


def test_nothing_asked_is_the_default() -> None:
    assert parse() == TranscriptionRequest()
    names = ("model", "language", "prompt", "response_format", "temperature", "stream", "task", "keywords[]")
    assert parse_request({name: [""] for name in names}) == TranscriptionRequest()


def test_fields_of_other_servers_are_ignored() -> None:
    extra = parse(vad_filter="False", repetition_penalty="1.1", seed="7", to_language="xx", vllm_xargs="{}", user="u")
    chunking = parse_request({"chunking_strategy[type]": ["server_vad"], "chunking_strategy[threshold]": ["0.5"]})
    assert extra == chunking == parse(chunking_strategy="auto") == TranscriptionRequest()


@pytest.mark.parametrize(
    ("sent", "code"), [("en", "en"), ("en-US", "en"), ("English", "en"), ("auto", ""), ("yue", "yue")]
)
def test_languages_in_every_spelling(sent: str, code: str) -> None:
    assert parse(language=sent).language == code


def test_an_unknown_language() -> None:
    assert refusal(language="klingon").param == "language"
    assert refusal(languages__=["en", "klingon"]).param == "languages"


def test_several_possible_languages_are_automatic_and_a_single_one_is_it() -> None:
    assert parse(languages__=["en", "de"]).language == ""
    assert parse(languages__=["en", "de"]).languages == ("en", "de")
    assert parse(languages__=["de"]).language == "de"
    assert parse(languages__=["de"], language="fr").language == "fr"


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp_granularities[]": ["word", "segment"]},
        {"timestamp_granularities": ["word", "segment"]},
        {"timestamp_granularities[0]": ["word"], "timestamp_granularities[1]": ["segment"]},
        {"timestamp_granularities": ["word, segment"]},
        {"timestamp_granularities[]": ["Word,SEGMENT"]},
        {"timestamp_granularities": ['["word", "segment"]']},
    ],
)
def test_a_list_in_every_spelling(fields: dict[str, list[str]]) -> None:
    assert parse_request(fields).granularities == {"word", "segment"}


def test_granularities_default_to_segments_and_know_two_values() -> None:
    assert parse(timestamp_granularities__="").granularities == {"segment"}
    assert parse(timestamp_granularities__="word").granularities == {"word"}
    error = refusal(timestamp_granularities__=["word", "phoneme"])
    assert error.param == "timestamp_granularities" and "phoneme" in error.message


def test_keywords_under_both_names() -> None:
    assert parse(keywords__=["Moore, Gordon", "ASR"], hotwords="ASR, Moonshine").keywords == (
        "Moore, Gordon",
        "ASR",
        "Moonshine",
    )
    assert parse(keywords='["a","b"]').keywords == ("a", "b")
    assert refusal(keywords__=[f"word{i}" for i in range(MAX_KEYWORDS + 1)]).param == "keywords"


@pytest.mark.parametrize("name", ["json", "text", "srt", "vtt", "verbose_json", "JSON", " srt "])
def test_formats(name: str) -> None:
    assert parse(response_format=name).response_format == name.strip().lower()


def test_formats_that_are_none() -> None:
    speakers = refusal(response_format="diarized_json")
    assert isinstance(speakers, errors.Unsupported) and speakers.hint and speakers.param == "response_format"
    unknown = refusal(response_format="xml")
    assert unknown.code == "invalid_value" and unknown.param == "response_format" and "verbose_json" in unknown.hint


@pytest.mark.parametrize("value", ["nan", "inf", "-0.1", "1.01", "hot", "0,5"])
def test_temperatures_that_are_none(value: str) -> None:
    assert refusal(temperature=value).param == "temperature"


def test_temperatures() -> None:
    assert [parse(temperature=value).temperature for value in ("0", "1", "0.25", " 1e-1 ")] == [0.0, 1.0, 0.25, 0.1]


@pytest.mark.parametrize(
    ("value", "flag"), [("true", True), ("True", True), ("1", True), ("false", False), ("0", False)]
)
def test_stream(value: str, flag: bool) -> None:
    assert parse_request({"stream": [value]}).stream is flag


def test_the_path_decides_over_the_field() -> None:
    assert parse_request({"stream": ["false"]}, stream=True).stream


def test_stream_is_neither() -> None:
    with pytest.raises(errors.BadRequest) as caught:
        parse_request({"stream": ["perhaps"]})
    assert caught.value.param == "stream"


def test_subtitles_are_not_streamed() -> None:
    with pytest.raises(errors.BadRequest) as caught:
        parse_request({"response_format": ["srt"]}, stream=True)
    assert caught.value.param == "stream" and caught.value.hint
    assert parse_request({"response_format": ["verbose_json"]}, stream=True).stream


def test_logprobs_are_asked_by_include() -> None:
    assert parse(include__="logprobs").logprobs
    assert not parse(include__="usage").logprobs


def test_a_translation_is_refused_and_not_returned_in_the_language_that_was_spoken() -> None:
    assert parse(task="transcribe")
    with pytest.raises(errors.Unsupported) as refused:
        parse(task="translate")
    assert refused.value.param == "task"
    with pytest.raises(errors.BadRequest) as caught:
        parse_request({"task": ["summarise"]})
    assert caught.value.param == "task"


def test_the_last_of_a_repeated_scalar_counts() -> None:
    assert parse(prompt=["first", "second"]).prompt == "second"


@pytest.mark.parametrize(
    ("response_format", "granularity", "wanted"),
    [("json", "word", False), ("verbose_json", "segment", False), ("verbose_json", "word", True), ("srt", "", True)],
)
def test_word_times_are_made_only_where_they_are_read(response_format: str, granularity: str, wanted: bool) -> None:
    request = parse(response_format=response_format, timestamp_granularities__=granularity)
    assert request.wants_words is wanted


def test_the_worker_gets_the_same() -> None:
    raw = RawAudio("s16le", 16000)
    options = parse(language="de", prompt="p", keywords="k", temperature="0.5", include__="logprobs").file_options(
        max_seconds=60.0, raw=raw
    )
    assert (options.language, options.prompt, options.keywords, options.temperature) == ("de", "p", ("k",), 0.5)
    assert options.logprobs and not options.words and options.raw == raw and options.max_seconds == 60.0


def test_every_transcription_model_of_the_sdk_is_known() -> None:
    assert set(get_args(AudioModel)) <= MODEL_ALIASES
    for name in ("", "Qwen/Qwen3-ASR-1.7B", *MODEL_ALIASES):
        assert resolve_model(name, "Qwen/Qwen3-ASR-1.7B") == "Qwen/Qwen3-ASR-1.7B"


def test_another_model_is_told_which_one_is_served() -> None:
    with pytest.raises(errors.ModelNotFound) as caught:
        resolve_model("Systran/faster-whisper-large-v3", "embedded")
    assert caught.value.param == "model" and "'embedded'" in caught.value.hint
