"""The speech plugins of LiveKit and pipecat, unmodified, against a real server. They live in an environment of their own, which
the first run makes beside the project's (three minutes, 750 MB): their requirements are none of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import ROOT, Server
from tests.speech import DATA, transcripts, word_errors

PACKAGES = ("livekit-agents>=1.8,<2", "livekit-plugins-openai>=1.8,<2", "pipecat-ai[openai]>=1.14,<2")
ENVIRONMENT = ROOT / ".venv-agents"
CLIPS = ("librivox-0890", "jfk")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the agents' environment."""
    interpreter, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        installing: list[str | Path] = [
            interpreter,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *PACKAGES,
        ]
        done = subprocess.run(installing, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the plugins cannot be installed: {done.stderr[-500:]}")
        stamp.touch()
    return interpreter


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("plugin", ["livekit", "pipecat"])
def test_an_agent_hears_every_word_and_no_error(server: Server, python: Path, plugin: str, name: str) -> None:
    path = DATA / f"{name}.wav"
    by_file = word_errors(transcripts()[name], server.transcribe(path).json()["text"])
    program = ROOT / "tests" / "agents" / f"{plugin}_stt.py"
    done = subprocess.run([python, program, server.url, "unused", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    heard = [(kind, text) for kind, text in json.loads(done.stdout.splitlines()[-1])]
    assert "error" not in {kind for kind, _ in heard}
    finals = [text for kind, text in heard if kind.startswith("final")]
    assert word_errors(transcripts()[name], " ".join(finals)) <= by_file + 2
    assert any(kind.startswith("interim") for kind, _ in heard)
