"""Voice activity: the same numbers as the published package, alone or in a batch, in pieces of any size."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.speech import NAMES, Audio, clip, silence
from worker.audio.vad import ASSETS, CONTEXT, FRAME, SileroVad, VadState

PACKAGE = importlib.util.find_spec("silero_vad")
needs_package = pytest.mark.skipif(
    PACKAGE is None or importlib.util.find_spec("torch") is None,
    reason="the silero-vad package and torch, which it needs, are not installed; our copy cannot be compared with it",
)

ROUNDING = 2e-5
"""Of a probability, between two graphs of the same weights, or calls of other sizes."""


@pytest.fixture(scope="module")
def vad() -> SileroVad:
    return SileroVad()


def frames(audio: Audio) -> Audio:
    return audio[: len(audio) // FRAME * FRAME].reshape(-1, FRAME)


def one_by_one(vad: SileroVad, audio: Audio) -> Audio:
    state = VadState()
    return np.concatenate([vad.probabilities([state], frame[None]) for frame in frames(audio)])


REFERENCE = """
import json, sys, wave
import numpy as np
import torch
from silero_vad import load_silero_vad
torch.set_grad_enabled(False)
model = load_silero_vad(onnx=True)
out = {}
for path in sys.argv[1:]:
    with wave.open(path) as file:
        audio = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    model.reset_states()
    count = len(audio) // 512
    frames = torch.from_numpy(audio[: count * 512]).reshape(count, 1, 512)
    out[path] = [float(model(frame, 16000)) for frame in frames]
print(json.dumps(out))
"""
"""In a process of its own: importing the package sets torch to one thread."""


@pytest.mark.torch
def test_nobody_is_told_that_it_runs(tmp_path: Path) -> None:
    """ONNX Runtime writes an identity and a queue of reports into the home folder, unless it is switched off."""
    code = "from worker.audio.vad import load_vad; load_vad()"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, **home}, timeout=60)
    assert list(tmp_path.rglob("*")) == []


@needs_package
def test_same_probabilities_as_the_package(vad: SileroVad) -> None:
    from tests.speech import DATA

    paths = [str(DATA / f"{name}.wav") for name in NAMES]
    done = subprocess.run([sys.executable, "-c", REFERENCE, *paths], capture_output=True, text=True, check=True)
    for name, expected in zip(NAMES, json.loads(done.stdout).values(), strict=True):
        ours = vad.sequence(VadState(), frames(clip(name)))
        assert np.abs(ours - np.array(expected)).max() < 1e-4
        assert np.ptp(ours) > 0.9  # speech and silence are both in it


@needs_package
def test_our_graph_decides_as_the_packages_does(vad: SileroVad) -> None:
    """Frame by frame, over all recordings as one stream: no probability moves by more than a threshold could notice."""
    import onnxruntime

    assert PACKAGE is not None and PACKAGE.origin is not None
    path = Path(PACKAGE.origin).parent / "data" / "silero_vad_16k_sequence.onnx"
    runtime: Any = onnxruntime
    theirs = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    audio = frames(np.concatenate([clip(name) for name in NAMES]))
    before = np.concatenate((np.zeros((1, CONTEXT), np.float32), audio[:-1, -CONTEXT:]))
    state = np.zeros((1, 1, 128), np.float32)
    inputs = {"input": np.concatenate((before, audio), axis=1), "h": state, "c": state}
    expected = np.asarray(theirs.run(["speech_probs"], inputs)[0])
    assert np.abs(vad.sequence(VadState(), audio) - expected).max() < ROUNDING


def test_readme_names_the_files_and_their_hashes() -> None:
    named = dict(re.findall(r"`(\w+\.onnx)` \|.*`([0-9a-f]{64})`", (ASSETS / "README.md").read_text()))
    assert named == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in ASSETS.glob("*.onnx")}
    assert len(named) == 1
    assert "MIT License" in (ASSETS / "LICENSE").read_text()


def test_sequence_and_streams_agree(vad: SileroVad) -> None:
    audio = clip("jfk")
    assert np.abs(one_by_one(vad, audio) - vad.sequence(VadState(), frames(audio))).max() < ROUNDING


@pytest.mark.parametrize("block", [1, 7, 32])
def test_blocks_of_any_size_agree(vad: SileroVad, block: int) -> None:
    audio = frames(clip("jfk"))
    state = VadState()
    pieces = [vad.sequence(state, audio[start : start + block]) for start in range(0, len(audio), block)]
    assert np.array_equal(np.concatenate(pieces), vad.sequence(VadState(), audio))


def test_streams_in_a_batch_do_not_hear_each_other(vad: SileroVad) -> None:
    """Three speakers and silence, which come and go in mid-batch."""
    audios = [frames(audio) for audio in (clip("jfk"), clip("librivox-0880"), clip("librivox-0930"), silence(5))]
    states = [VadState() for _ in audios]
    heard: list[list[float]] = [[] for _ in audios]
    for number in range(max(map(len, audios))):
        rows = [row for row, audio in enumerate(audios) if number < len(audio) and (number + row) % 5]
        if rows:
            batch = np.stack([audios[row][len(heard[row])] for row in rows])
            for row, value in zip(rows, vad.probabilities([states[row] for row in rows], batch), strict=True):
                heard[row].append(float(value))
    for audio, values in zip(audios, heard, strict=True):
        alone = vad.sequence(VadState(), audio[: len(values)])
        assert len(values) > 50
        assert np.abs(alone - np.array(values)).max() < ROUNDING


def test_both_ways_share_a_state(vad: SileroVad) -> None:
    """A live stream may be caught up as a block and go on frame by frame."""
    audio = frames(clip("jfk"))
    state = VadState()
    mixed = [vad.sequence(state, audio[:100])]
    mixed += [vad.probabilities([state], frame[None]) for frame in audio[100:200]]
    mixed += [vad.sequence(state, audio[200:])]
    assert np.abs(np.concatenate(mixed) - vad.sequence(VadState(), audio)).max() < ROUNDING


def test_reset_forgets_and_copy_keeps(vad: SileroVad) -> None:
    audio = frames(clip("jfk"))
    state = VadState()
    vad.sequence(state, audio[:60])
    twin = state.copy()
    rest = vad.sequence(state, audio[60:])
    assert np.array_equal(vad.sequence(twin, audio[60:]), rest)
    state.reset()
    assert np.array_equal(vad.sequence(state, audio), vad.sequence(VadState(), audio))
    assert not np.array_equal(vad.sequence(VadState(), audio[60:]), rest)


def test_context_belongs_to_the_frame(vad: SileroVad) -> None:
    state = VadState()
    audio = frames(clip("jfk"))
    vad.sequence(state, audio[:40])
    assert np.array_equal(state.context, audio[39, -CONTEXT:])
    vad.probabilities([state], audio[40:41])
    assert np.array_equal(state.context, audio[40, -CONTEXT:])


def test_nothing_to_do(vad: SileroVad) -> None:
    empty = np.zeros((0, FRAME), np.float32)
    assert vad.probabilities([], empty).shape == (0,)
    assert vad.sequence(VadState(), empty).shape == (0,)


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 480), np.float32), np.zeros((2, FRAME), np.float32), np.zeros((1, FRAME), np.float64)]
)
def test_frames_of_a_wrong_shape(vad: SileroVad, wrong: Audio) -> None:
    with pytest.raises(ValueError, match="shape"):
        vad.probabilities([VadState()], wrong)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy as np; from worker.audio.vad import *;"
        "v = SileroVad(); v.sequence(VadState(), np.zeros((3, FRAME), np.float32));"
        "v.probabilities([VadState()], np.zeros((1, FRAME), np.float32));"
        "print(sorted(m for m in ('torch', 'silero_vad', 'transformers') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
