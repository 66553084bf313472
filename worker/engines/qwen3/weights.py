"""The recogniser's weights: modules named as transformers names them, filled from the files, straight on the device.

The engine computes with its own passes; of a model it needs the parameters alone, under the names of the published files
(``Qwen3ASRForConditionalGeneration``). Every one of them comes from a file, none is left over, and each has the shape
that the configuration says, or nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from worker.engines.base import Report
from worker.engines.qwen3.checkpoint import Checkpoint, original_name, weight_files
from worker.engines.qwen3.config import AudioConfig, ModelConfig, TextConfig
from worker.engines.qwen3.faults import damaged, require_complete, require_numbers

_EMBEDDING, _HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""Some old tools have written it; it follows from the configuration."""
_MAX_TIMESCALE = 10_000.0


# ---------------------------------------------------------------- modules


class Weight(nn.Module):
    """A parameter that no module of torch is needed for. (``nn.Embedding`` on no device imports torch's compiler: 2 s.)"""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class AudioAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))


class AudioLayer(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = AudioAttention(config.d_model)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)


class Sinusoids(nn.Module):
    """Positions inside a second. They are computed, not read."""

    positional_embedding: Tensor


class AudioTower(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        width, channels = config.d_model, config.downsample_hidden_size
        self.positional_embedding = Sinusoids()
        self.conv2d1 = nn.Conv2d(1, channels, 3, 2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        bins = config.num_mel_bins
        for _ in range(3):
            bins = (bins + 1) // 2
        self.conv_out = nn.Linear(channels * bins, width, bias=False)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.ln_post = nn.LayerNorm(width)


class Projector(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.d_model, config.d_model)
        self.linear_2 = nn.Linear(config.d_model, config.output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, d_model)`` to ``(…, output_dim)``."""
        out: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(x)))
        return out


class TextAttention(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        own, shared = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, own, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(own, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = Weight(c.head_dim), Weight(c.head_dim)


class TextMlp(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class TextLayer(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.self_attn = TextAttention(c)
        self.mlp = TextMlp(c)
        self.input_layernorm, self.post_attention_layernorm = Weight(c.hidden_size), Weight(c.hidden_size)


class TextModel(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Weight(config.hidden_size)


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.audio_tower = AudioTower(config.audio_config)
        self.multi_modal_projector = Projector(config.audio_config)
        self.language_model = TextModel(config.text_config)


class Recogniser(nn.Module):
    """As ``Qwen3ASRForConditionalGeneration``, without a forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)


# ---------------------------------------------------------------- filling them


def load_recogniser(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, report: Report) -> Recogniser:
    """The model on ``device``, in ``dtype``. ``report`` gets the share of the tensors that are read.

    Raises ModelLoadFailed: a file that cannot be read, keys or shapes that do not fit, weights that are not finite, named.
    """
    with torch.device("meta"):
        model = Recogniser(checkpoint.config)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    unexpected = []
    try:
        for name, tensor in _tensors(checkpoint, device):
            if name.endswith(_COMPUTED):
                continue
            if name not in wanted:
                unexpected.append(name)
                continue
            if not tensor.is_floating_point():
                raise ValueError(f"{name} is {tensor.dtype}, and no floating point")
            found[name] = tensor.to(dtype)
            sums[name] = found[name].sum(dtype=torch.float32)
            report("loading", 0.1 + 0.7 * len(found) / len(wanted))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(checkpoint.folder, error) from error
    if checkpoint.config.tie_word_embeddings:
        _tie(found)
    require_complete(
        checkpoint.folder,
        missing=[name for name in wanted if name not in found],
        unexpected=unexpected,
        misshaped=[name for name, tensor in found.items() if tuple(tensor.shape) != wanted[name]],
    )
    finite = torch.stack(list(sums.values())).isfinite().tolist()
    require_numbers(checkpoint.folder, [name for name, good in zip(sums, finite, strict=True) if not good])
    model.load_state_dict(found, assign=True)
    if found[_HEAD] is found[_EMBEDDING]:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.requires_grad_(requires_grad=False)
    audio = checkpoint.config.audio_config
    model.model.audio_tower.positional_embedding.positional_embedding = sinusoids(
        audio.max_position_embeddings, audio.d_model
    ).to(device)
    return model.eval()


def _tie(found: dict[str, Tensor]) -> None:
    """One matrix for both ends, unless the file has two that differ."""
    embedding, head = found.get(_EMBEDDING), found.get(_HEAD)
    if embedding is None and head is not None:
        found[_EMBEDDING] = head
    elif embedding is not None and (head is None or torch.equal(embedding, head)):
        found[_HEAD] = embedding


def _tensors(checkpoint: Checkpoint, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, under its native name. Raises OSError, ValueError, KeyError, SafetensorError."""
    for path in weight_files(checkpoint.folder):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield original_name(name) if checkpoint.original_layout else name, file.get_tensor(name)


def sinusoids(length: int, channels: int) -> Tensor:
    """Shape ``(length, channels)``, float32: sines, then cosines, of wavelengths from 2 pi to ``_MAX_TIMESCALE`` times that."""
    step = np.log(_MAX_TIMESCALE) / (channels // 2 - 1)
    inverse = torch.exp(-step * torch.arange(channels // 2).float())
    angle = torch.arange(length)[:, None] * inverse[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=1)
