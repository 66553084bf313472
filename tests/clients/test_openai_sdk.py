"""The ``openai`` SDK, unmodified, against a real server: what a program that was written for OpenAI's API sees."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import openai
import pysrt
import pytest
import webvtt
from openai import AsyncOpenAI, OpenAI
from openai.types.audio import Transcription, TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent

from tests.server import Server, serving
from tests.speech import DATA, clip, join, transcripts, wav, word_errors, words

MODEL = "moonshine-tiny-en"
SHORT = DATA / "librivox-0880.wav"
SEVERAL = ("librivox-0880", "librivox-0930", "librivox-0890")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def long_speech() -> tuple[str, bytes]:
    """Three sentences with pauses: several segments and several subtitle cues."""
    return "three.wav", wav(join([clip(name) for name in SEVERAL], [0.5, 1.2]))


# ---------------------------------------------------------------- formats


def test_json(client: OpenAI) -> None:
    with (DATA / "jfk.wav").open("rb") as file:
        answer = client.audio.transcriptions.create(model=MODEL, file=file)
    assert isinstance(answer, Transcription)
    assert word_errors(transcripts()["jfk"], answer.text) <= 2
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == 11


def test_text_is_the_text_of_json(client: OpenAI) -> None:
    plain = client.audio.transcriptions.create(model=MODEL, file=SHORT).text
    assert client.audio.transcriptions.create(model=MODEL, file=SHORT, response_format="text").strip() == plain


def test_verbose_json_has_segments_and_words_as_numbers(client: OpenAI, long_speech: tuple[str, bytes]) -> None:
    answer = client.audio.transcriptions.create(
        model=MODEL, file=long_speech, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert answer.language == "english"
    assert isinstance(answer.duration, float)
    assert answer.segments is not None
    assert len(answer.segments) >= 2
    assert "".join(segment.text for segment in answer.segments) == answer.text
    assert answer.words is not None
    assert words(" ".join(word.word for word in answer.words)) == words(answer.text)
    for spans in (answer.segments, answer.words):
        clock = 0.0
        for span in spans:
            assert clock <= span.start < span.end
            clock = span.end
        assert clock <= answer.duration


def test_verbose_json_without_words_unless_they_are_asked_for(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(model=MODEL, file=SHORT, response_format="verbose_json")
    assert answer.words is None
    assert answer.segments
    only_words = client.audio.transcriptions.create(
        model=MODEL, file=SHORT, response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert only_words.words
    assert only_words.segments is None


def test_srt_passes_a_strict_parser(client: OpenAI, long_speech: tuple[str, bytes]) -> None:
    body = client.audio.transcriptions.create(model=MODEL, file=long_speech, response_format="srt")
    parser: Any = pysrt
    cues = parser.from_string(body, error_handling=parser.ERROR_RAISE)
    assert [cue.index for cue in cues] == list(range(1, len(cues) + 1))
    _check_cues([(cue.start.ordinal / 1000, cue.end.ordinal / 1000, cue.text) for cue in cues])


def test_vtt_passes_a_strict_parser(client: OpenAI, long_speech: tuple[str, bytes]) -> None:
    body = client.audio.transcriptions.create(model=MODEL, file=long_speech, response_format="vtt")
    assert body.startswith("WEBVTT\n\n")
    captions = webvtt.from_buffer(io.StringIO(body))
    _check_cues([(_seconds(cue.start), _seconds(cue.end), cue.text) for cue in captions.captions])


def _seconds(clock: str) -> float:
    hours, minutes, rest = clock.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


def _check_cues(cues: list[tuple[float, float, str]]) -> None:
    """Readable, in order, and all of the text."""
    assert len(cues) >= 2
    clock = 0.0
    for start, end, text in cues:
        lines = text.split("\n")
        assert len(lines) <= 2, text
        assert max(map(len, lines)) <= 42, text
        assert clock <= start < end <= start + 7, (start, end)
        clock = end
    said = " ".join(transcripts()[name] for name in SEVERAL)
    assert word_errors(said, " ".join(text for _, _, text in cues)) <= 5


def test_speakers_are_a_typed_error(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=SHORT, response_format="diarized_json")
    assert (caught.value.status_code, caught.value.code) == (501, "unsupported")
    assert caught.value.param == "response_format"


# ---------------------------------------------------------------- streams


def test_stream_yields_the_events_of_the_sdk(client: OpenAI, long_speech: tuple[str, bytes]) -> None:
    deltas: list[str] = []
    done: list[str] = []
    with client.audio.transcriptions.create(model=MODEL, file=long_speech, stream=True) as events:
        for event in events:
            match event:
                case TranscriptionTextDeltaEvent(type="transcript.text.delta"):
                    assert not done
                    deltas.append(event.delta)
                case TranscriptionTextDoneEvent(type="transcript.text.done"):
                    done.append(event.text)
                case _:
                    raise AssertionError(f"the SDK does not know {event!r}")
    assert len(deltas) >= 2
    assert done == ["".join(deltas)]
    assert done[0] == client.audio.transcriptions.create(model=MODEL, file=long_speech).text


def test_stream_of_a_bad_file_raises_before_the_first_event(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=("notes.wav", b"no sound in here " * 99), stream=True)
    assert (caught.value.status_code, caught.value.code) == (415, "unsupported_audio")


def test_stream_path_needs_no_field(server: Server) -> None:
    with SHORT.open("rb") as file:
        answer = server.http.post("/v1/audio/transcriptions/stream", files={"file": file})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "transcript.text.done" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


# ---------------------------------------------------------------- errors


def test_bad_file(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=("notes.mp3", b"this is no sound at all\n" * 50))
    assert (caught.value.status_code, caught.value.code) == (415, "unsupported_audio")
    assert caught.value.type == "invalid_request_error"
    assert "Send a sound" in caught.value.message


def test_empty_file(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=("empty.wav", b""))
    assert caught.value.code == "empty_audio"


def test_wav_without_a_sample(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=("header.wav", SHORT.read_bytes()[:44]))
    assert caught.value.code == "empty_audio"


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.audio.transcriptions.create(model="whisper-9", file=SHORT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert MODEL in caught.value.message


def test_a_language_that_the_model_does_not_know_is_refused(client: OpenAI, server: Server) -> None:
    """English words for a German request would be wrong in silence."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=SHORT, language="de")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "language")
    assert "German" in caught.value.message
    assert server.transcribe(SHORT, language="en-US").status_code == 200
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=MODEL, file=SHORT, extra_body={"languages": ["de", "fr"]})
    assert caught.value.param == "languages"
    both = client.audio.transcriptions.create(model=MODEL, file=SHORT, extra_body={"languages": ["de", "en"]})
    assert both.text


def test_missing_file_and_missing_form(server: Server) -> None:
    without = server.http.post("/v1/audio/transcriptions", files={"other": ("a.wav", b"x")}, data={"model": MODEL})
    assert without.status_code == 400
    assert (without.json()["error"]["code"], without.json()["error"]["param"]) == ("missing_field", "file")
    no_form = server.http.post("/v1/audio/transcriptions", json={"model": MODEL})
    assert no_form.status_code == 400
    assert "multipart/form-data" in no_form.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_an_error_that_stays_is_not_sent_again(server: Server) -> None:
    """The SDK repeats 5xx, upload and all, unless the answer says that it is no use."""
    sent: list[str] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(request.url.path)]})
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=2, http_client=http) as sdk,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        sdk.audio.translations.create(model=MODEL, file=SHORT)
    assert (caught.value.status_code, caught.value.code) == (501, "unsupported")
    assert "does not translate" in caught.value.message
    assert sent == ["/v1/audio/translations"]


# ---------------------------------------------------------------- models, fields, keys


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve("whisper-1").id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("Qwen/Qwen3-ASR-9B")


@pytest.mark.parametrize("alias", ["whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", ""])
def test_aliases_mean_the_served_model(client: OpenAI, alias: str) -> None:
    assert "young man" in client.audio.transcriptions.create(model=alias, file=SHORT).text


def test_fields_as_the_sdk_sends_them(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model="gpt-4o-transcribe",
        file=("recording.wav", io.BytesIO(SHORT.read_bytes()), "audio/wav"),
        language="en",
        prompt="Sense and Sensibility, chapter 1.",
        temperature=0.0,
        include=["logprobs"],
        chunking_strategy={"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200},
        extra_body={"hotwords": "ill-disposed", "a_field_of_another_server": "1"},
    )
    assert "young man" in answer.text


def test_keys() -> None:
    with serving(api_keys="first-key,second-key", idle_seconds=5) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="second-key", max_retries=0) as sdk:
            assert [model.id for model in sdk.models.list()] == [MODEL]
        with OpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0) as sdk:
            for call in (sdk.models.list, lambda: sdk.audio.transcriptions.create(model=MODEL, file=SHORT)):
                with pytest.raises(openai.AuthenticationError) as caught:
                    call()
                assert caught.value.code == "invalid_api_key"
        assert server.http.get("/health").status_code == 200
        for door in ("/ready", "/api/ps", "/v1/models", "/no/such/door"):
            answer = server.http.get(door)
            assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer"), door
            assert answer.headers["x-request-id"]
            assert answer.headers["server-timing"].startswith("total;dur=")
        assert "guess" not in server.log()
        assert "second-key" not in server.log()


# ---------------------------------------------------------------- several at once


TOGETHER = (*SEVERAL, "librivox-0920")


async def test_several_at_once_get_their_own_answers(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:

        async def whole(name: str) -> str:
            return (await sdk.audio.transcriptions.create(model=MODEL, file=DATA / f"{name}.wav")).text

        async def streamed(name: str) -> str:
            stream = await sdk.audio.transcriptions.create(model=MODEL, file=DATA / f"{name}.wav", stream=True)
            async with stream:
                return "".join([e.delta async for e in stream if e.type == "transcript.text.delta"])

        texts = await asyncio.gather(*(whole(name) for name in TOGETHER), *(streamed(name) for name in TOGETHER))
    heard, spelled = texts[: len(TOGETHER)], texts[len(TOGETHER) :]
    assert heard == spelled
    for name, text in zip(TOGETHER, heard, strict=True):
        assert word_errors(transcripts()[name], text) <= 2, name
