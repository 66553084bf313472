"""The flight recorder: what a dead process leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from shared.recorder import Recorder, Slot, read


def test_both_slots_are_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.begin(Slot.ENGINE, [("a", 3), ("b", 0)])
    recorder.begin(Slot.AUDIO, [("c", 1)])
    assert read(tmp_path / "r") == {"a": 3, "b": 0, "c": 1}


def test_the_lowest_segment_in_hand_counts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.begin(Slot.ENGINE, [("a", 5), ("a", 4)])
    assert read(tmp_path / "r") == {"a": 4}


def test_ended_work_leaves_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.begin(Slot.ENGINE, [("a", 3)])
    recorder.end(Slot.ENGINE)
    assert read(tmp_path / "r") == {}


def test_more_than_fits_is_cut_not_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.begin(Slot.ENGINE, [(f"request-{number:06d}", number) for number in range(5000)])
    found = read(tmp_path / "r")
    assert len(found) > 500
    assert found["request-000007"] == 7


def test_no_file_and_a_torn_file_are_no_suspects(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") == {}
    (tmp_path / "torn").write_bytes(b"\x05\x00")
    assert read(tmp_path / "torn") == {}


def test_it_survives_sigkill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from shared.recorder import Recorder, Slot\n"
        "recorder = Recorder(Path(sys.argv[1])); recorder.begin(Slot.ENGINE, [('last', 9)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read(tmp_path / "r") == {"last": 9}
    assert os.path.getsize(tmp_path / "r") < 64 * 1024  # noqa: PTH202
