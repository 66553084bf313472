"""What stops a start, and what it says: on one line, with the setting to look at, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import EngineFailed, ModelLoadFailed
from tests.server import free_port, serving
from tests.speech import DATA
from worker.__main__ import load_failure


def start(tmp_path: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """Start a server that cannot be started."""
    chosen = {"port": free_port(), "model": "embedded", "spool_dir": tmp_path / "spool", **settings}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NAPSCRIBE_")}
    environment |= {f"NAPSCRIBE_{key.upper()}": str(value) for key, value in chosen.items()}
    command = [str(Path(sys.executable).parent / "napscribe"), "serve"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "nohost.invalid"}, "nohost.invalid"),
        ({"host": "1.2.3.4"}, "cannot listen on 1.2.3.4"),
        ({"model": "/nowhere/at/all"}, "NAPSCRIBE_MODEL"),
        ({"model": "fooo"}, "NAPSCRIBE_MODEL"),
        ({"spool_dir": "/proc/x"}, "NAPSCRIBE_SPOOL_DIR"),
        ({"runtime_dir": "/proc/x"}, "NAPSCRIBE_RUNTIME_DIR"),
        ({"runtime_dir": "/tmp/" + "long" * 30}, "NAPSCRIBE_RUNTIME_DIR"),
        ({"wyoming_port": 0, "port": 0}, "NAPSCRIBE_PORT"),
        ({"latency_log": "/nowhere/x"}, "NAPSCRIBE_LATENCY_LOG"),
        ({"aligner": "/nowhere/x"}, "NAPSCRIBE_ALIGNER"),
        ({"live_model": "~nobody-of-this-name/x"}, "NAPSCRIBE_LIVE_MODEL"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    done = start(tmp_path, **settings)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with serving() as first:
        done = start(tmp_path, port=first.port)
        assert done.returncode == 2
        assert "Address already in use" in done.stderr
        assert first.http.get("/health").status_code == 200


def test_wyoming_needs_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    done = start(tmp_path, port=port, wyoming_port=port)
    assert "are the same" in done.stderr


HIDING = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "moonshine_voice" else found(name, *rest)
"""


def test_a_missing_package_is_told_at_the_start_and_to_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    how = "pip install 'napscribe[embedded]'"
    with serving(script=True) as server:
        assert "moonshine_voice" in server.log()
        assert how in server.log()
        answer = server.transcribe(DATA / "librivox-0930.wav")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_load_failed")
        assert how in answer.json()["error"]["message"]


def test_nothing_is_said_of_packages_that_are_there(tmp_path: Path) -> None:
    for model in ("embedded", str(DATA / "qwen3-asr-tiny")):
        with serving(script=True, model=model) as server:
            assert "needs" not in server.log()


def test_a_name_is_an_address(tmp_path: Path) -> None:
    with serving(host="localhost") as server:
        assert server.http.get("/health").status_code == 200


def test_a_model_that_breaks_in_an_unforeseen_way_is_told_once() -> None:
    """It would break at every start."""
    with serving(model="scripted:load_breaks=1") as server:
        for generation in (1, 2):
            answer = server.transcribe(DATA / "jfk.wav")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "model_load_failed")
            assert "ZeroDivisionError: told to break" in error["message"]
            assert "log" in error["message"]
            assert server.worker["generation"] == generation
        assert "Traceback" in server.log()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA-capable device(s) is/are busy"), MemoryError(), OSError(5, "I/O")]
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    with pytest.raises(type(error)):
        load_failure(error, "m")


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), TypeError("x"), ImportError("x")])
def test_what_would_come_again_is_told(error: Exception) -> None:
    failure = load_failure(error, "the-model")
    assert isinstance(failure, ModelLoadFailed)
    assert "the-model" in failure.message
    assert type(error).__name__ in failure.message
    assert failure.hint
    known = EngineFailed("known")
    assert load_failure(known, "m") is known
