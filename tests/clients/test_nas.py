"""Media servers: ``/asr`` and ``/detect-language`` as Bazarr, subgen and n8n call them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pysrt
import pytest
import webvtt

from tests.server import Server, serving
from tests.speech import DATA, clip, transcripts, word_errors

NAME = "librivox-0930"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def asr(server: Server, body: bytes, field: str = "audio_file", path: str = "/asr", **query: str) -> httpx.Response:
    return server.http.post(path, params=query, files={field: ("audio_file", body)})


def recording() -> bytes:
    return (DATA / f"{NAME}.wav").read_bytes()


def test_text_is_the_default(server: Server) -> None:
    answer = asr(server, recording())
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert word_errors(transcripts()[NAME], answer.text) <= 1


def test_bazarr_posts_headerless_audio_and_reads_srt(server: Server) -> None:
    pcm = (clip(NAME) * 32767).astype("<i2").tobytes()
    query = {"task": "transcribe", "language": "en", "output": "srt", "encode": "false", "video_file": "film.mkv"}
    answer = asr(server, pcm, **query)
    cues = pysrt.from_string(answer.text)
    assert word_errors(transcripts()[NAME], " ".join(cue.text for cue in cues)) <= 1


def test_vtt_is_valid(server: Server) -> None:
    answer = asr(server, recording(), output="vtt")
    assert webvtt.from_string(answer.text).captions


def test_tsv_has_milliseconds(server: Server) -> None:
    head, *rows = asr(server, recording(), output="tsv").text.splitlines()
    assert head == "start\tend\ttext"
    start, end, text = rows[0].split("\t")
    assert 0 <= int(start) < int(end) <= 3300
    assert text


def test_json_has_segments_and_words(server: Server) -> None:
    answer = asr(server, recording(), output="json", word_timestamps="true").json()
    assert answer["language"] == "en"
    assert answer["segments"][0]["text"]
    assert answer["words"][0]["start"] < answer["words"][0]["end"]


def test_a_language_that_the_model_does_not_know_is_refused(server: Server) -> None:
    answer = asr(server, recording(), language="de")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "language"


def test_detect_language(server: Server) -> None:
    answer = asr(server, recording(), path="/detect-language").json()
    assert answer["detected_language"] == "english"
    assert answer["language_code"] == "en"
    assert isinstance(answer["confidence"], float)


def test_detect_language_listens_to_half_a_minute_only(server: Server) -> None:
    steps = server.worker["steps"]
    pcm = (clip("jfk") * 32767).astype("<i2").tobytes() * 60
    answer = asr(server, pcm, path="/detect-language", encode="false").json()
    assert answer["language_code"] == "en"
    server.until(lambda: server.worker["steps"] > steps, "steps reported")
    assert server.worker["steps"] - steps <= 10


def test_silence_has_no_language(server: Server) -> None:
    answer = asr(server, bytes(32_000 * 3), path="/detect-language", encode="false").json()
    assert answer == {"detected_language": "unknown", "language_code": "", "confidence": 0.0}


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ({"output": "docx"}, 400, "output"),
        ({"task": "translate"}, 501, "task"),
        ({"language": "klingon"}, 400, "language"),
    ],
)
def test_mistakes_are_typed(server: Server, query: dict[str, str], status: int, param: str) -> None:
    answer = asr(server, recording(), **query)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_a_missing_file_is_typed(server: Server) -> None:
    answer = server.http.post("/asr", files={"other": ("a", b"b")})
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["code"] == "missing_field"
