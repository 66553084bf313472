"""A checkpoint's configuration, as far as the engine reads it.

transformers has classes for it, too; importing them takes longer than everything else that a start needs. Names and defaults
are theirs, and the tests hold both beside each other. What they guess and nobody should is required here: the rotary base.
"""

from __future__ import annotations

from typing import Any

import msgspec


class AudioConfig(msgspec.Struct, frozen=True):
    """Of the audio tower (``Qwen3ASREncoderConfig``)."""

    num_mel_bins: int = 128
    encoder_layers: int = 24
    encoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    d_model: int = 1024
    activation_function: str = "gelu"
    n_window: int = 50
    output_dim: int = 3584
    n_window_infer: int = 800
    downsample_hidden_size: int = 480
    max_position_embeddings: int = 13


class TextConfig(msgspec.Struct, frozen=True):
    """Of the text model (``Qwen3Config``)."""

    rope_parameters: dict[str, Any]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151_936
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False


class ModelConfig(msgspec.Struct, frozen=True):
    """Of the whole (``Qwen3ASRConfig``)."""

    audio_config: AudioConfig
    text_config: TextConfig
    eos_token_id: list[int] | int | None = None
    tie_word_embeddings: bool = True


def parse(raw: dict[str, Any]) -> ModelConfig:
    """From the native layout's ``config.json``. Raises msgspec.ValidationError, which names the field."""
    return msgspec.convert(raw, ModelConfig)
