"""Builds small random checkpoints of the published architecture, in both layouts, through transformers' own classes.

The weights are larger than an initialisation would make them, so that the text model's answers vary with every token and
every sound: a model whose logits are flat would pass any equality test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
PLAIN = ["<asr_text>", "<timestamp>"]
GAIN = 3.0

hugging: Any = transformers


def build_random(folder: Path, *, seed: int = 0, gain: float = GAIN) -> Path:
    """A checkpoint of some 200,000 random parameters in the native layout; byte tokens, the real special tokens.

    ``gain``: of a linear layer's output over its input. Below 2 the answers fall into short loops.
    """
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    model = hugging.Qwen3ASRForConditionalGeneration(_config(tokenizer)).eval()
    _make_vivid(model, tokenizer, gain)
    save(model, tokenizer, folder)
    return folder


def build_aligner(folder: Path, *, labels: int = 300) -> Path:
    """A random forced aligner of the published architecture, with fewer classes than the published 5,000."""
    torch.manual_seed(1)
    tokenizer = byte_tokenizer()
    config = _config(tokenizer)
    config.num_labels = labels
    model = hugging.Qwen3ASRForTokenClassification(config).eval()
    _make_vivid(model, tokenizer)
    save(model, tokenizer, folder, template=ALIGNER_TEMPLATE)
    return folder


ALIGNER_TEMPLATE = (
    "{%- set ns = namespace(audio='', words=[]) -%}{%- for m in messages -%}{%- for c in m.content -%}"
    "{%- if c.type == 'audio' -%}{%- set ns.audio = '<|audio_start|><|audio_pad|><|audio_end|>' -%}"
    "{%- elif c.type == 'text' -%}{%- set ns.words = ns.words + [c.text] -%}{%- endif -%}{%- endfor -%}{%- endfor -%}"
    "{{- ns.audio + ns.words | join('<timestamp><timestamp>') + '<timestamp><timestamp>' -}}"
)


def save(model: Any, tokenizer: Any, folder: Path, *, template: str = "") -> None:
    """Weights, configuration, tokenizer and processor, as a hub folder has them."""
    model.save_pretrained(folder)
    shipped = Path(__file__).parents[1] / "data" / "qwen3-asr-tiny" / "chat_template.jinja"
    processor = hugging.Qwen3ASRProcessor(
        feature_extractor=hugging.Qwen3ASRFeatureExtractor(),
        tokenizer=tokenizer,
        chat_template=template or shipped.read_text("utf-8"),
    )
    processor.save_pretrained(folder)


def to_original_layout(source: Path, folder: Path) -> Path:
    """The same weights under the names and the configuration of the first published checkpoints, of a recogniser or an aligner."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    save_file({_old_name(k): v for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    audio = {**config["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
    audio |= {"max_source_positions": 1500, "conv_chunksize": 500}
    del audio["max_position_embeddings"]
    text = {**config["text_config"], "model_type": "qwen3_asr_text", "rope_theta": 1_000_000}
    del text["rope_parameters"]
    text["rope_scaling"] = {"rope_type": "default", "type": "default", "mrope_section": [6, 5, 5], "interleaved": True}
    old: dict[str, Any] = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "support_languages": ["English"],
        "thinker_config": {
            "model_type": "qwen3_asr",
            "audio_config": audio,
            "text_config": text,
            "audio_token_id": config["audio_token_id"],
        },
    }
    if "score.weight" in weights:
        old["timestamp_token_id"] = config["timestamp_token_id"]
        old["thinker_config"] |= {
            "model_type": "qwen3_forced_aligner",
            "classify_num": len(weights["score.weight"]),
            "text_config": {**text, "tie_word_embeddings": False},
        }
    (folder / "config.json").write_text(json.dumps(old))
    (folder / "processor_config.json").unlink()
    return folder


def byte_tokenizer() -> Any:
    """256 byte tokens and the model's own."""
    tokenizer = hugging.Qwen2Tokenizer(
        vocab={symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.add_tokens(PLAIN, special_tokens=False)
    return tokenizer


def _config(tokenizer: Any) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    return hugging.Qwen3ASRConfig(
        audio_config={
            "model_type": "qwen3_asr_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": 16,
            "max_position_embeddings": 13,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "bos_token_id": None,
            "pad_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
        },
        audio_token_id=ids("<|audio_pad|>"),
        timestamp_token_id=ids("<timestamp>"),
        pad_token_id=ids("<|endoftext|>"),
        eos_token_id=[ids("<|endoftext|>"), ids("<|im_end|>")],
        tie_word_embeddings=True,
    )


def _make_vivid(model: Any, tokenizer: Any, gain: float = GAIN) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0)
                # A longer vector wins more often: some answers shall end before their budget.
                weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= END_FACTOR
            elif weight.dim() > 1:
                fan_in = weight[0].numel()
                weight.normal_(0.0, gain / fan_in**0.5)


END_FACTOR = 1.3


def _old_name(key: str) -> str:
    for new, old in (
        ("model.multi_modal_projector.linear_1", "thinker.audio_tower.proj1"),
        ("model.multi_modal_projector.linear_2", "thinker.audio_tower.proj2"),
        ("model.language_model.", "thinker.model."),
        ("model.audio_tower.", "thinker.audio_tower."),
        ("score.", "thinker.lm_head."),
    ):
        if key.startswith(new):
            return old + key[len(new) :]
    return "thinker." + key
