"""Silero VAD (version 6, MIT, ``assets/README.md``) on onnxruntime alone: one thread, no torch.

The network looks at frames of 512 samples (32 ms at 16 kHz) with the 64 samples before them and carries the state of an LSTM
from frame to frame. There are two graphs of the same weights, whose probabilities differ by rounding alone (1e-5):

- *streams*: one frame of each of many streams in one call, for live audio (about 30 µs a frame in batches, 70 µs alone);
- *blocks*: many frames of one stream in one call, for files. Everything but the LSTM is a few matrix products over all frames
  at once, and the cost of a call is paid once a block: 25 µs a frame in blocks of 32. The package's graph for this, which
  convolves frame by frame, takes 65.

Each is loaded when it is first needed (10 and 20 ms).
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
    def _streams(self) -> Any:
        return _session(self._folder / "silero_vad_16k_op15.onnx")

    @cached_property
    def _blocks(self) -> Any:
        return _session(self._folder / "silero_vad_16k_blocks.onnx")

    def probabilities(self, states: Sequence[VadState], frames: Audio) -> Probabilities:
        """The next frame of each of B streams: ``frames`` has shape ``(B, 512)``, the result ``(B,)``. Moves the states on."""
        _check(frames, len(states))
        if not states:
            return np.zeros(0, np.float32)
        inputs = np.concatenate((np.stack([state.context for state in states]), frames), axis=1)
        lstm = np.stack([state.lstm for state in states], axis=1)
        out, moved = self._streams.run(None, {"input": inputs, "state": lstm, "sr": _RATE})
        for row, state in enumerate(states):
            state.lstm = moved[:, row].copy()
            state.context = frames[row, -CONTEXT:].copy()
        return _flat(out)

    def sequence(self, state: VadState, frames: Audio) -> Probabilities:
        """The next N frames of one stream: ``frames`` has shape ``(N, 512)``, the result ``(N,)``. Moves the state on."""
        _check(frames, len(frames))
        if not len(frames):
            return np.zeros(0, np.float32)
        contexts = np.concatenate((state.context[None], frames[:-1, -CONTEXT:]))
        inputs = np.concatenate((contexts, frames), axis=1)
        out, hidden, cell = self._blocks.run(
            None, {"input": inputs, "h": state.lstm[0].reshape(1, 1, -1), "c": state.lstm[1].reshape(1, 1, -1)}
        )
        state.lstm = np.concatenate((hidden, cell)).reshape(2, _UNITS)
        state.context = frames[-1, -CONTEXT:].copy()
        return _flat(out)


_RATE = np.array(SAMPLE_RATE, np.int64)


def _check(frames: Audio, rows: int) -> None:
    if frames.shape != (rows, FRAME) or frames.dtype != np.float32:
        raise ValueError(f"Frames must be float32 of shape ({rows}, {FRAME}), not {frames.dtype} {frames.shape}.")


def _flat(out: Any) -> Probabilities:
    return np.asarray(out, np.float32).reshape(-1)


def _session(path: Path) -> Any:
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # the network is small; an arena would only grow to the longest block
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def load_vad() -> SileroVad:
    """The network with both graphs loaded and checked. Raises ModelLoadFailed."""
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
