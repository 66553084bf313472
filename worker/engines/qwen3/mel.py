"""Log-mel features on the engine's device, equal to transformers' ``Qwen3ASRFeatureExtractor`` for a single clip.

The features are Whisper's: 25 ms Hann windows every 10 ms, 128 Slaney mel bands, log10, everything more than 80 dB below the
loudest value lifted to that floor, then ``(x + 4) / 4``. Only the floor looks at the whole utterance: for sound that is
still growing it follows the running maximum, and windows that are closed keep the floor they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engines.qwen3 import geometry
from worker.engines.qwen3.audio import Stretch

_TINY = 1e-10
_ROWS_ROUNDED = 8
_LENGTH_ROUNDED = 16_000
_RATE, _HIGHEST_HZ = 16_000, 8_000.0
_BREAK_HZ, _HZ_A_MEL, _LOG_STEP = 1_000.0, 200.0 / 3.0, float(np.log(6.4)) / 27.0
"""Slaney's scale."""
_RANGE = 8.0
"""Of log10 power: 80 dB."""


@dataclass(frozen=True)
class MelBatch:
    """Features of several clips."""

    features: Tensor
    """Shape ``(clips, 128, frames)``, float32; frames is a multiple of the window, zero behind each clip's end."""
    loudest: Tensor
    """Shape ``(clips,)``: the running maximum of log10 power, this batch included."""


class LogMel:
    """Filter bank and window on the device; samples pass through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bank = torch.from_numpy(mel_bank()).to(device, torch.float32)
        self._window = torch.hann_window(geometry.FFT, device=device)

    def __call__(self, clips: Sequence[Stretch], frames: Sequence[int], loudest: Sequence[Tensor | None]) -> MelBatch:
        """Features of ``clips`` (as ``SampleBuffer.for_frames`` cuts them), with ``frames`` frames each.

        ``loudest``: the running maximum of what came before in the same utterance, a 0-d tensor, or None.
        """
        samples = self._upload(clips)
        spectrum = torch.stft(
            samples, geometry.FFT, geometry.HOP, window=self._window, center=False, return_complex=True
        )
        power = self._bank @ (spectrum.abs() ** 2)
        log_power = power.clamp_(min=_TINY).log10_()
        count = torch.tensor([*frames, *[0] * (len(samples) - len(frames))]).to(self._device, non_blocking=True)
        inside = torch.arange(log_power.shape[-1], device=self._device) < count[:, None]
        inside = inside[:, None]
        running = log_power.masked_fill(~inside, -torch.inf).amax(dim=(1, 2))
        if any(before is not None for before in loudest):
            quiet = torch.full_like(running[0], -torch.inf)
            earlier = [quiet if b is None else b for b in loudest]
            running = torch.maximum(running, torch.stack(earlier + [quiet] * (len(samples) - len(clips))))
        floored = torch.maximum(log_power, running[:, None, None] - _RANGE)
        features = ((floored + 4.0) / 4.0).masked_fill_(~inside, 0.0)
        missing = -features.shape[-1] % geometry.WINDOW_FRAMES
        return MelBatch(torch.nn.functional.pad(features, (0, missing))[: len(clips)], running[: len(clips)])

    def _upload(self, clips: Sequence[Stretch]) -> Tensor:
        """One padded batch on the device. On CUDA the copy is asynchronous; torch's pool of pinned memory gives the buffer out
        again only when the copy is done.

        There both sizes are rounded up: cuFFT makes a plan for every new shape. What lies behind a clip's end is anything at
        all, which costs nothing: no frame of the clip sees it, and what frames behind them give is masked.
        """
        # A clip that has less than a frame of new sound has none.
        rows, length = len(clips), max(geometry.FFT, *map(len, clips))
        if self._device.type == "cuda":
            rows = rows if rows < _ROWS_ROUNDED else -(-rows // _ROWS_ROUNDED) * _ROWS_ROUNDED
            length = -(-(length + geometry.HOP - geometry.FFT) // _LENGTH_ROUNDED) * _LENGTH_ROUNDED
            length += geometry.FFT - geometry.HOP
        batch = torch.empty(rows, length, pin_memory=self._device.type == "cuda")
        host = batch.numpy()
        for row, clip in zip(host, clips, strict=False):
            clip.write(row[: len(clip)])
        return batch.to(self._device, non_blocking=True) if self._device.type == "cuda" else batch


def mel_bank() -> npt.NDArray[np.float64]:
    """Shape ``(128, 201)``: triangles of equal area, equally far apart on Slaney's scale (M. Slaney, Auditory Toolbox, 1998),
    which is linear up to 1 kHz and logarithmic above."""
    edges = _hertz(np.linspace(_mel(0.0), _mel(_HIGHEST_HZ), geometry.MELS + 2))
    bins = np.linspace(0.0, _RATE // 2, 1 + geometry.FFT // 2)
    slopes = edges[:, None] - bins
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    area = 2.0 / (edges[2:] - edges[:-2])
    bank: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]
    return bank


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HZ:
        return hertz / _HZ_A_MEL
    return _BREAK_HZ / _HZ_A_MEL + float(np.log(hertz / _BREAK_HZ)) / _LOG_STEP


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    turn = _BREAK_HZ / _HZ_A_MEL
    above: npt.NDArray[np.float64] = _BREAK_HZ * np.exp(_LOG_STEP * (mels - turn))
    return np.where(mels < turn, _HZ_A_MEL * mels, above)
