"""Qwen3-ASR through the whole server, with the small trained checkpoint: exact words, streams, crashes, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server import Server, events_of, serving
from tests.speech import DATA, silence, wav

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="needs the `qwen` extra"
    ),
]

TINY = DATA / "qwen3-asr-tiny"
WAVES = sorted((TINY / "samples").glob("*.wav"))
LONG = next(path for path in WAVES if path.stem.startswith("long"))
SHORT = next(path for path in WAVES if path.stem == "flite-awb")


def said(path: Path) -> str:
    return path.with_suffix(".txt").read_text("utf-8").strip()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(model=TINY, threads=1) as running:
        yield running


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("path", WAVES, ids=lambda path: path.stem)
def test_a_sample_is_transcribed_exactly(server: Server, path: Path) -> None:
    answer = server.transcribe(path)
    assert answer.json()["text"] == said(path)


@pytest.mark.parametrize("path", WAVES, ids=lambda path: path.stem)
def test_a_stream_says_its_words_one_by_one(server: Server, path: Path) -> None:
    """Who reads late is told several words at once, so a busy machine gets some attempts."""
    most = 0
    for _ in range(5):
        *deltas, done = events_of(server.transcribe(path, stream="true", language="en").text)
        assert done["text"] == said(path)
        assert "".join(event["delta"] for event in deltas) == done["text"]
        most = max(most, len(deltas))
        if most > 0.5 * len(said(path).split()):
            return
    raise AssertionError(f"words come at the segment's end, in {most} pieces")


@pytest.mark.parametrize("level", [0.0, 0.02], ids=["silence", "noise"])
def test_nothing_said_is_nothing(server: Server, tmp_path: Path, level: float) -> None:
    path = tmp_path / "quiet.wav"
    rng = np.random.default_rng(0)
    path.write_bytes(wav((silence(3.0) + level * rng.standard_normal(48_000)).astype(np.float32)))
    assert server.transcribe(path, response_format="verbose_json").json()["text"] == ""


def test_everything_that_verbose_json_promises(server: Server) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    answer = server.transcribe(LONG, **fields).json()
    words = answer["words"]
    assert [word["word"].strip() for word in words] == said(LONG).split()
    assert answer["timing"] == "estimated"
    assert all(word["start"] < word["end"] <= answer["duration"] for word in words)
    assert all(before["end"] <= after["start"] for before, after in pairwise(words))
    assert answer["language"] == "english"
    segments = server.transcribe(LONG, response_format="verbose_json").json()["segments"]
    assert all(-3 < segment["avg_logprob"] < 0 for segment in segments)


def test_log_probabilities_spell_the_text(server: Server) -> None:
    answer = server.transcribe(SHORT, **{"include[]": "logprobs"}).json()
    assert "".join(entry["token"] for entry in answer["logprobs"]).strip() == said(SHORT)
    assert all(entry["logprob"] <= 0 for entry in answer["logprobs"])


def test_scores_of_a_delta_spell_the_delta(server: Server) -> None:
    *deltas, done = events_of(server.transcribe(LONG, stream="true", **{"include[]": "logprobs"}).text)
    told = [event for event in deltas if "logprobs" in event]
    assert len(deltas) > len(told) > 0
    for event in told:
        assert "".join(token["token"] for token in event["logprobs"]) == event["delta"]
    assert "".join(token["token"] for token in done["logprobs"]) == done["text"]


@pytest.mark.parametrize("language", ["en", ""], ids=["forced", "found"])
def test_the_language_is_reported(server: Server, language: str) -> None:
    answer = server.transcribe(SHORT, **({"language": language} if language else {})).json()
    assert answer["languages"] == [{"code": "en"}]


def test_a_language_that_the_model_does_not_know_is_refused(server: Server) -> None:
    answer = server.transcribe(SHORT, language="la")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "language"


def test_hot_words_reach_the_model(server: Server) -> None:
    """A context changes how sure the model is of the same words, and each of both fields does."""

    def surest(**fields: str) -> list[float]:
        answer = server.transcribe(SHORT, language="en", **{"include[]": "logprobs"}, **fields).json()
        return [entry["logprob"] for entry in answer["logprobs"]]

    plain, prompt, words = surest(), surest(prompt="Napscribe, Granian"), surest(**{"keywords[]": "Dactylopiidae"})
    assert plain == surest()
    assert len({tuple(plain), tuple(prompt), tuple(words)}) == 3


# ---------------------------------------------------------------- the worker


def test_the_worker_reports_its_slots_and_threads(server: Server) -> None:
    server.transcribe(SHORT)
    worker = server.worker
    assert (worker["engine"], worker["device"], worker["slots"]) == ("qwen3", "cpu", 8)
    assert worker["device_bytes"] == 0


@pytest.mark.parametrize("scores", [False, True], ids=["words", "with their scores"])
def test_a_killed_worker_goes_on_where_it_was(server: Server, tmp_path: Path, scores: bool) -> None:
    """Every word as without the kill; what was done is not done again. Long enough not to be over before the kill."""
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 6)))
    unkilled = server.transcribe(path, stream="true", language="en").text
    generation = server.worker["generation"]
    asked = {"include[]": "logprobs"} if scores else {}
    done = killed_in_mid_stream(server, path, lambda body: body.count(".delta") >= 12, kill, asked)
    assert server.worker["generation"] == generation + 1
    assert done["text"] == events_of(unkilled)[-1]["text"]
    assert done["text"].startswith(said(LONG))
    spelled = "".join(token["token"] for token in done.get("logprobs", ()))
    assert spelled == (done["text"] if scores else "")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def killed_in_mid_stream(
    server: Server,
    path: Path,
    moment: Callable[[str], bool],
    end: Callable[[int], None] = kill,
    fields: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Read a stream; its worker is ended when ``moment`` holds of the body so far. The last event, whose text is the sum of the
    deltas."""
    pid, body = server.worker_pid(), ""
    with (
        path.open("rb") as file,
        server.http.stream(
            "POST",
            "/v1/audio/transcriptions",
            files={"file": file},
            data={"stream": "true", "language": "en", **fields},
        ) as answer,
    ):
        for piece in answer.iter_text():
            body += piece
            if pid and moment(body):
                end(pid)
                pid = 0
    assert not pid, "it was not killed"
    *deltas, done = events_of(body)
    assert "".join(event["delta"] for event in deltas) == done["text"]
    return done


@pytest.mark.slow
def test_what_a_killed_worker_has_finished_is_not_done_again(tmp_path: Path) -> None:
    """Twice as many segments as there are slots: those of the first round are kept. The journal counts what was decoded."""
    from tests.torch.running import read_audio

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.concatenate([read_audio(LONG), silence(2.5)] * 16)))
    with serving(model=TINY, threads=1, debug_timing=1) as server:
        server.http.timeout = 300
        unkilled = server.transcribe(path, stream="true", language="en").text
        first = server.worker_pid()
        segments = finals(server.log(), first)
        assert segments >= 16

        def round_over(_body: str) -> bool:
            """The journal knows of a segment before the gateway does, and what is on its way when a worker is killed is lost."""
            over = finals(server.log(), first) >= segments + 8
            time.sleep(0.3 if over else 0)
            return over

        text = killed_in_mid_stream(server, path, round_over)["text"]
        again = finals(server.log(), server.worker_pid())
    assert text == events_of(unkilled)[-1]["text"]
    assert 0 < again <= segments - 8, "the first round was complete"


def finals(log: str, pid: int) -> int:
    """Segments that a worker has decoded to their end, by the journal's lines about steps."""
    steps = (json.loads(line) for line in log.splitlines() if '"event":"step"' in line)
    return sum(step["gave"].get("Final", 0) for step in steps if step["pid"] == pid)


# ---------------------------------------------------------------- checkpoints that are no good


def refused(model: object) -> dict[str, Any]:
    """The error of a transcription with this model, which comes at once and not after several starts."""
    with serving(model=model, threads=1) as server:
        answer = server.transcribe(SHORT)
        assert answer.status_code == 503, answer.text
        assert server.worker["generation"] == 1
        error: dict[str, Any] = answer.json()["error"]
        assert error["code"] == "model_load_failed"
        return error


def test_a_hub_id_without_a_network_says_what_to_do() -> None:
    error = refused("Qwen/Qwen3-ASR-0.6B-hf")
    assert "Qwen/Qwen3-ASR-0.6B-hf" in error["message"]
    assert any(word in error["message"] for word in ("folder", "NAPSCRIBE_MODEL", "network"))


def test_missing_weights_stop_the_start_with_their_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken, ignore=shutil.ignore_patterns("samples"))
    weights = load_file(broken / "model.safetensors")
    gone = sorted(weights)[3]
    save_file({k: v for k, v in weights.items() if k != gone}, broken / "model.safetensors", metadata={"format": "pt"})
    assert gone in refused(broken)["message"]


def test_the_original_layout_and_an_aligner_work_end_to_end(tmp_path: Path) -> None:
    """Times of a random aligner mean nothing, but they are its own: exact in kind, in order, inside the audio."""
    from tests.torch.checkpoints import build_aligner, to_original_layout

    original = to_original_layout(TINY, tmp_path / "original")
    aligner = build_aligner(tmp_path / "aligner")
    with serving(model=original, aligner=aligner, threads=1) as server:
        fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        answer = server.transcribe(SHORT, language="en", **fields).json()
        assert answer["text"] == said(SHORT)
        assert "timing" not in answer
        assert [word["word"].strip() for word in answer["words"]] == said(SHORT).split()
        assert all(before["end"] <= after["start"] for before, after in pairwise(answer["words"]))


def test_an_aligner_that_cannot_be_loaded_leaves_estimates(tmp_path: Path) -> None:
    with serving(model=TINY, aligner=tmp_path, threads=1) as server:
        fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        answer = server.transcribe(SHORT, language="en", **fields).json()
        (line,) = (line for line in server.log().splitlines() if "alignment_failed" in line)
    assert answer["text"] == said(SHORT)
    assert answer["timing"] == "estimated"
    assert len(answer["words"]) == len(said(SHORT).split())
    assert all(0 <= word["start"] < word["end"] <= answer["duration"] for word in answer["words"])
    assert "config.json" in json.loads(line)["hint"]
