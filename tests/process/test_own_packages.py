"""Started from a folder with a ``worker``, ``shared`` and ``gateway`` of its own: ours run all the same.

People start servers from the folder they are in, and these names are common. A worker that imported theirs would at best
not start; at worst it would run code that a stranger left there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server import ROOT, serving
from tests.speech import transcripts, word_errors

CLIP = "librivox-0880"
PACKAGES = ("gateway", "shared", "worker")
STDLIB = ("asyncio", "queue", "wave")
"""Names of the standard library are as tempting: a ``queue.py`` of the user's breaks programs every day."""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder whose modules leave a note and raise when anybody imports them."""
    note = f"from pathlib import Path\nPath({str(tmp_path / 'note')!r}).touch()\nraise ImportError('not ours')\n"
    for package in PACKAGES:
        folder = tmp_path / package
        folder.mkdir()
        for module in ("__init__", "__main__"):
            (folder / f"{module}.py").write_text(note)
    for module in STDLIB:
        (tmp_path / f"{module}.py").write_text(note)
    return tmp_path


@pytest.mark.parametrize("script", [True, False], ids=["napscribe serve", "python -P -m"])
def test_packages_of_the_folder_are_not_ours(trapped: Path, script: bool) -> None:
    with serving(cwd=trapped, script=script, idle_seconds=60) as server:
        answer = server.transcribe(ROOT / "tests" / "data" / f"{CLIP}.wav")
        assert answer.status_code == 200, answer.text
        assert word_errors(transcripts()[CLIP], answer.json()["text"]) <= 1
        assert Path(f"/proc/{server.worker_pid()}/cwd").resolve() == trapped
    assert not (trapped / "note").exists()
