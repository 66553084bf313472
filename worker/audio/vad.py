"""Silero VAD (version 6, MIT, ``assets/README.md``) on onnxruntime alone: one thread, no torch.

The network looks at frames of 512 samples (32 ms at 16 kHz) with the 64 samples before them and carries the state of an LSTM
from frame to frame. One graph (``ci/vad_graph.py``) takes the next frame of each of many streams, for live audio, or many frames of one
stream, for files: everything but the LSTM is a few matrix products over all frames of the call, and what a call costs is paid
once. On one core of the machine of ``docs/benchmarks.md``: 12 µs a frame for 25 streams and more, 22 µs in blocks of 32, 60 µs
alone. The package's graphs take 50, 65 and 138; probabilities differ from theirs by rounding (1e-5).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from shared.errors import ModelLoadFailed
from shared.pcm import SAMPLE_RATE
from worker.audio.samples import Audio

FRAME = 512
"""Samples of a frame; the network knows no other length at 16 kHz."""

CONTEXT = 64
"""Samples before a frame that are looked at again."""

FRAME_S = FRAME / SAMPLE_RATE

_UNITS = 128

ASSETS = Path(__file__).parents[1] / "assets"

Probabilities = npt.NDArray[np.float32]
"""Probability of speech, one a frame, shape ``(frames,)``."""


class VadState:
    """What one stream carries from frame to frame: LSTM state and hidden output, and the end of the last frame."""

    __slots__ = ("context", "lstm")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As at the start of a stream, after silence."""
        self.lstm: Audio = np.zeros((2, _UNITS), np.float32)
        self.context: Audio = np.zeros(CONTEXT, np.float32)

    def copy(self) -> VadState:
        twin = VadState()
        twin.lstm, twin.context = self.lstm.copy(), self.context.copy()
        return twin


class SileroVad:
    """The network. It keeps nothing of a stream; ``VadState`` does. Any thread may call it."""

    def __init__(self, folder: Path = ASSETS) -> None:
        self._folder = folder

    @cached_property
    def _network(self) -> Any:
        return _session(self._folder / "silero_vad_16k.onnx")

    def probabilities(self, states: Sequence[VadState], frames: Audio) -> Probabilities:
        """The next frame of each of B streams: ``frames`` has shape ``(B, 512)``, the result ``(B,)``. Moves the states on."""
        _check(frames, len(states))
        if not states:
            return np.zeros(0, np.float32)
        inputs = np.concatenate((np.stack([state.context for state in states]), frames), axis=1)
        lstm = np.stack([state.lstm for state in states], axis=1)
        out, moved = self._run(inputs, lstm)
        for row, state in enumerate(states):
            state.lstm = moved[:, row].copy()
            state.context = frames[row, -CONTEXT:].copy()
        return out

    def sequence(self, state: VadState, frames: Audio) -> Probabilities:
        """The next N frames of one stream: ``frames`` has shape ``(N, 512)``, the result ``(N,)``. Moves the state on."""
        _check(frames, len(frames))
        if not len(frames):
            return np.zeros(0, np.float32)
        contexts = np.concatenate((state.context[None], frames[:-1, -CONTEXT:]))
        inputs = np.concatenate((contexts, frames), axis=1)
        out, moved = self._run(inputs, state.lstm[:, None])
        state.lstm = moved[:, 0].copy()
        state.context = frames[-1, -CONTEXT:].copy()
        return out

    def _run(self, inputs: Audio, lstm: Audio) -> tuple[Probabilities, Audio]:
        """``inputs`` of shape ``(frames, 576)``, those of a moment together; ``lstm`` of shape ``(2, streams, 128)``."""
        out, hidden, cell = self._network.run(None, {"input": inputs, "h": lstm[:1], "c": lstm[1:]})
        return np.asarray(out, np.float32), np.concatenate((hidden, cell))


def _check(frames: Audio, rows: int) -> None:
    if frames.shape != (rows, FRAME) or frames.dtype != np.float32:
        raise ValueError(f"Frames must be float32 of shape ({rows}, {FRAME}), not {frames.dtype} {frames.shape}.")


def _session(path: Path) -> Any:
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # the network is small; an arena would only grow to the longest block
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def load_vad() -> SileroVad:
    """The network, loaded and tried. Raises ModelLoadFailed."""
    vad = SileroVad()
    try:
        vad.probabilities([VadState()], np.zeros((1, FRAME), np.float32))
        vad.sequence(VadState(), np.zeros((1, FRAME), np.float32))
    except Exception as error:
        raise ModelLoadFailed(
            f"Voice activity detection cannot be loaded: {error}",
            hint="Install the server again: pip install 'napscribe[embedded]'.",
        ) from error
    return vad
