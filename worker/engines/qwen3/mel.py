"""Log-mel features on the engine's device, equal to transformers' ``Qwen3ASRFeatureExtractor`` for a single clip.

The features are Whisper's: 25 ms Hann windows every 10 ms, 128 Slaney mel bands, log10, everything more than 80 dB below the
loudest value lifted to that floor, then ``(x + 4) / 4``. Only the floor looks at the whole utterance: for sound that is
still growing it follows the running maximum, and windows that are closed keep the floor they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engines.base import Audio
from worker.engines.qwen3 import geometry

_TINY = 1e-10
_ROWS_ROUNDED = 8
_LENGTH_ROUNDED = 16_000
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
        from transformers.audio_utils import mel_filter_bank

        bank = mel_filter_bank(
            num_frequency_bins=1 + geometry.FFT // 2,
            num_mel_filters=geometry.MELS,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=16_000,
            norm="slaney",
            mel_scale="slaney",
        )
        self._device = device
        self._bank = torch.from_numpy(np.ascontiguousarray(bank.T)).to(device, torch.float32)
        self._window = torch.hann_window(geometry.FFT, device=device)

    def __call__(self, clips: Sequence[Audio], frames: Sequence[int], loudest: Sequence[Tensor | None]) -> MelBatch:
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

    def _upload(self, clips: Sequence[Audio]) -> Tensor:
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
            row[: len(clip)] = clip
        return batch.to(self._device, non_blocking=True) if self._device.type == "cuda" else batch
