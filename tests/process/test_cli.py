"""``napscribe transcribe``: a running server from the command line, found where its settings put it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import free_port, serving
from tests.speech import DATA, transcripts, word_errors

CLIP = DATA / "librivox-0930.wav"


def transcribe(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NAPSCRIBE_")}
    environment |= {f"NAPSCRIBE_{key.upper()}": str(value) for key, value in settings.items()}
    command = [str(Path(sys.executable).parent / "napscribe"), "transcribe", str(CLIP), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_server_is_where_the_settings_say_or_where_it_is_said_to_be() -> None:
    with serving() as server:
        for done in (
            transcribe(port=server.port),
            transcribe(port=server.port, host="0.0.0.0"),
            transcribe("--server", f"127.0.0.1:{server.port}", "--stream"),
            transcribe("--server", f"http://127.0.0.1:{server.port}/"),
        ):
            assert done.returncode == 0, done.stderr
            assert word_errors(transcripts()[CLIP.stem], done.stdout) <= 2


def test_words_as_they_come_have_no_other_format() -> None:
    done = transcribe("--stream", "--format", "srt")
    assert done.returncode == 2
    assert "--stream" in done.stderr


@pytest.mark.parametrize("named", [True, False])
def test_where_there_is_no_server_it_says_where_it_looked(named: bool) -> None:
    port = free_port()
    done = transcribe("--server", f"http://127.0.0.1:{port}") if named else transcribe(port=port)
    assert done.returncode == 1
    assert f"http://127.0.0.1:{port}" in done.stderr
    assert "--server" in done.stderr
