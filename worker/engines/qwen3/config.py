"""A checkpoint's configuration, as far as the engine reads it.

transformers has classes for it, too; importing them takes longer than everything else that a start needs. Names and defaults
are theirs, and the tests hold both beside each other. What they guess and nobody should is required here: the rotary base.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

PLAIN_ROPE = "default"
_SAME_POSITION_THREE_TIMES = "mrope"
"""Of the original layout: its sections carry equal positions, which is the plain embedding."""


Layers = Annotated[int, Meta(ge=1, le=1_000)]
Size = Annotated[int, Meta(ge=1, le=2**20)]
"""Of something that memory is allocated for; the published models stay below 2**14."""
Ids = Annotated[int, Meta(ge=1, le=2**24)]
Id = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class AudioConfig(msgspec.Struct, frozen=True):
    """Of the audio tower (``Qwen3ASREncoderConfig``)."""

    num_mel_bins: Size = 128
    encoder_layers: Layers = 24
    encoder_attention_heads: Size = 16
    encoder_ffn_dim: Size = 4096
    d_model: Size = 1024
    activation_function: str = "gelu"
    n_window: int = 50
    output_dim: Size = 3584
    n_window_infer: int = 800
    downsample_hidden_size: Size = 480
    max_position_embeddings: Size = 13


class TextConfig(msgspec.Struct, frozen=True):
    """Of the text model (``Qwen3Config``)."""

    rope_theta: float
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    vocab_size: Ids = 151_936
    head_dim: Size = 128
    rope_type: str = "default"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False


class ModelConfig(msgspec.Struct, frozen=True):
    """Of the whole (``Qwen3ASRConfig``)."""

    audio_config: AudioConfig
    text_config: TextConfig
    eos_token_id: list[Id] | Id | None = None
    quantization_config: Any = None
    tie_word_embeddings: bool = True


def parse(raw: dict[str, Any]) -> ModelConfig:
    """From the native layout's ``config.json``. Raises msgspec.ValidationError, which names the field."""
    text = raw.get("text_config")
    if isinstance(text, dict):
        raw = {**raw, "text_config": text | rope(text)}
    return msgspec.convert(raw, ModelConfig)


def rope(text: dict[str, Any]) -> dict[str, Any]:
    """Base and type of the rotary embedding, wherever a generation of transformers has written them. Of two types, one that is
    not the plain one counts: it is refused, because positions would be scaled."""
    places = [found for key in ("rope_parameters", "rope_scaling") if isinstance(found := text.get(key), dict)]
    types = [str(place.get("rope_type") or place.get("type") or PLAIN_ROPE) for place in places]
    told = [theta for place in (*places, text) if (theta := place.get("rope_theta")) is not None]
    kind = next((kind for kind in types if kind not in (PLAIN_ROPE, _SAME_POSITION_THREE_TIMES)), PLAIN_ROPE)
    return {"rope_type": kind} | ({"rope_theta": told[0]} if told else {})
