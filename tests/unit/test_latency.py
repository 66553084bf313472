"""The latency log: what a line holds, what it never holds, and how it is summed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import latency
from gateway.latency import LatencyLog, percentiles, stages_ms, summary
from shared.streams import UtteranceFinal, UtteranceTimings

TIMINGS = UtteranceTimings(
    speech_end_ns=1_000_000_000,
    endpoint_ns=500_000_000,
    buffered_ns=1_000_000,
    queue_ns=2_500_000,
    engine_ns=80_000_000,
    windows=7,
)


def final(text: str = "what was said") -> UtteranceFinal:
    return UtteranceFinal(1, "req_1.0", 3, 16_000, 40_000, 40_000, text, cause="silence", timings=TIMINGS)


def test_stages_in_milliseconds() -> None:
    stages = stages_ms(TIMINGS, 1_620_000_000)
    assert tuple(stages) == latency.STAGES
    assert (stages["speech_end_to_final"], stages["endpoint"], stages["queue"]) == (620.0, 500.0, 2.5)
    assert stages_ms(UtteranceTimings(), 5)["speech_end_to_final"] is None


def test_a_line_an_utterance_and_no_word_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"older": "line"}\n')
    log = LatencyLog(path)
    for _ in range(3):
        log.utterance(final())
    log.close()
    assert "said" not in path.read_text()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4, "it appends"
    last = lines[-1]
    assert (last["request_id"], last["utterance"], last["cause"], last["audio_ms"]) == ("req_1.0", 3, "silence", 1500)
    assert (last["endpoint_ms"], last["buffered_ms"], last["engine_ms"], last["windows"]) == (500.0, 1.0, 80.0, 7)
    assert last["speech_end_to_final_ms"] > 0


def test_a_disk_that_is_behind_costs_lines_and_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MAX_WAITING", 0)
    log = LatencyLog(tmp_path / "log")
    log.utterance(final())
    log.close()
    assert log.lost == 1
    assert (tmp_path / "log").read_text() == ""


def test_a_full_disk_is_logged_once_and_the_calls_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    log = LatencyLog(Path("/dev/full"))
    for _ in range(3):
        log.utterance(final())
    log.close()
    assert log.lost == 3
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        LatencyLog(tmp_path)


# ---------------------------------------------------------------- the sum


def test_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentiles(values) == (50.0, 90.0, 99.0)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([2.0, 1.0]) == (1.0, 2.0, 2.0)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_percentiles_are_values_that_occurred_in_order(values: list[float]) -> None:
    found = percentiles(values)
    assert set(found) <= set(values)
    assert list(found) == sorted(found)
    assert sum(value <= found[0] for value in values) * 2 >= len(values)


def test_summary_leaves_out_what_is_none_of_its_lines() -> None:
    lines: list[bytes | str] = [
        '{"speech_end_to_final_ms": 600.5, "endpoint_ms": 500}',
        b'{"speech_end_to_final_ms": null, "endpoint_ms": 300}',
        "",
        "rubbish",
        b"\xff\xfe",
        "[" * 5000,
        '{"event": "serving"}',
    ]
    rows, foreign = summary(lines)
    assert foreign == 4
    assert [(row.stage, row.count, row.ms[0]) for row in rows] == [
        ("speech_end_to_final", 1, 600.5),
        ("endpoint", 2, 300),
    ]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40)))
def test_any_file_can_be_summed_up(lines: list[bytes | str]) -> None:
    rows, foreign = summary(lines)
    assert rows == []
    assert foreign <= len(lines)
