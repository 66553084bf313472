"""From a folder or a hub id to a checkpoint that is surely a published one, or an error that says what to do.

Two layouts exist. ``Qwen/Qwen3-ASR-*-hf`` is what transformers reads. The original one (``thinker_config`` in config.json)
is read by transformers *without an error* into a model of random weights; here it is rewritten in memory. In both cases a
weight that is missing, left over or of another shape ends the start.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelLoadFailed
from worker.engines.base import Report
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.config import PLAIN_ROPE, Id, ModelConfig, parse, rope
from worker.engines.qwen3.faults import damaged, first_line, require_complete, require_numbers
from worker.engines.qwen3.hub import MODEL, Setting, find

_MODEL_TYPE = "qwen3_asr"
_TOKENIZER_FILES = "The folder needs tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json."

# Names of the original layout (regular expressions, as transformers wants them) and what they are called now. Order
# matters: the projector lived inside the audio tower.
_ORIGINAL_NAMES = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
}
_ORIGINAL_HEAD = r"^thinker\.lm_head\."
"""``lm_head`` of a recogniser, ``score`` of an aligner."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, its configuration read and, where needed, rewritten."""

    name: str
    """As the caller said it."""
    folder: Path
    raw: dict[str, Any]
    """``config.json`` in the words of the native layout."""
    config: ModelConfig
    eos: frozenset[int]
    """Tokens that end a text, as the configuration and ``generation_config.json`` say."""
    original_layout: bool


def open_checkpoint(name: str, report: Report, setting: Setting = MODEL) -> Checkpoint:
    """Find ``name`` (a local folder or a hub id), downloading where that is possible, and read its configuration.

    Raises ModelLoadFailed: no such folder or id, no network (with ``retry_after``), not a Qwen3-ASR checkpoint, a shape that is not supported.
    """
    folder = find(name, report, setting)
    raw = _read_config(folder)
    original = "thinker_config" in raw
    if raw.get("model_type") != _MODEL_TYPE:
        raise ModelLoadFailed(
            f"{name} is a checkpoint of type {raw.get('model_type')!r}, not Qwen3-ASR.",
            hint=f"Set {setting.name} to {setting.published} or a local copy.",
        )
    try:
        raw = _modern(raw) if original else raw
        config = parse(raw)
        eos = _eos(folder, config)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise _not_understood(name, error) from error
    _require_known_shape(config, name)
    return Checkpoint(name, folder, raw, config, eos, original)


def load_aligner(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """transformers' ``Qwen3ASRForTokenClassification`` on the CPU, in evaluation mode, every weight from the file.

    Raises ModelLoadFailed naming the keys where the file and the model disagree.
    """
    try:
        import transformers

        hugging: Any = transformers
        config, kind = hugging.Qwen3ASRConfig.from_dict(checkpoint.raw), hugging.Qwen3ASRForTokenClassification
    except (ImportError, AttributeError) as error:
        raise ModelLoadFailed(
            "The forced aligner needs transformers 5.15 or later.", hint="Install it: pip install 'napscribe[qwen]'."
        ) from error
    except (TypeError, ValueError, KeyError) as error:
        raise _not_understood(checkpoint.name, error) from error
    hugging.utils.logging.disable_progress_bar()
    _require_floats(checkpoint)
    # ``None`` and an empty mapping are different things to transformers, so the argument is left out where it is not needed.
    extra = {"key_mapping": _ORIGINAL_NAMES | {_ORIGINAL_HEAD: "score."}} if checkpoint.original_layout else {}
    try:
        model, info = kind.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            # Shapes that differ are then listed by name, and refused below with everything else.
            ignore_mismatched_sizes=True,
            **extra,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise damaged(checkpoint.folder, error) from error
    keys = {
        what: [key[0] if isinstance(key, tuple) else key for key in info.get(f"{what}_keys") or ()]
        for what in ("missing", "unexpected", "mismatched")
    }
    require_complete(
        checkpoint.folder, missing=keys["missing"], unexpected=keys["unexpected"], misshaped=keys["mismatched"]
    )
    sums = {name: parameter.sum(dtype=torch.float32) for name, parameter in model.named_parameters()}
    require_numbers(checkpoint.folder, [name for name, total in sums.items() if not total.isfinite()])
    return model.eval()


def original_name(name: str) -> str:
    """A recogniser's weight of the original layout as the native one calls it."""
    for pattern, now in (_ORIGINAL_NAMES | {_ORIGINAL_HEAD: "lm_head."}).items():
        name, found = re.subn(pattern, now, name)
        if found:
            break
    return name


def load_tokenizer(checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    """The tokenizer beside the weights. Raises ModelLoadFailed if there is none.

    ``tokenizer.json`` is complete in itself. The original layout has the parts that it is made of, which transformers
    knows how to put together.
    """
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file() and not (checkpoint.folder / "vocab.json").is_file():
        raise ModelLoadFailed(f"There is no tokenizer in {checkpoint.folder}.", hint=_TOKENIZER_FILES)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else None
        if tokenizer is None or tokenizer.token_to_id("<asr_text>") is None:
            import transformers

            hugging: Any = transformers
            tokenizer = hugging.AutoTokenizer.from_pretrained(
                checkpoint.folder, local_files_only=True
            ).backend_tokenizer
    except Exception as error:  # tokenizers raises no narrower one
        raise ModelLoadFailed(
            f"The tokenizer in {checkpoint.folder} could not be read: {first_line(error)}",
            hint=_TOKENIZER_FILES,
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def weight_files(folder: Path) -> list[Path]:
    """A whole file counts before an index, as it does to transformers. Raises OSError, ValueError."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"there is no {whole.name} in it")
    try:
        names = msgspec.convert(_read_json(index).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise ValueError(f"{index.name}: weight_map: {error}") from error
    return [folder / name for name in sorted(set(names.values()))]


def _require_floats(checkpoint: Checkpoint) -> None:
    """Raises ModelLoadFailed, naming a weight that holds no floating-point numbers: transformers would convert it without a word."""
    try:
        for path in weight_files(checkpoint.folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    kind = file.get_slice(name).get_dtype()
                    if not kind.startswith(("F", "BF")):
                        raise ValueError(f"{name} is {kind}, and no floating point")
    except (OSError, ValueError, SafetensorError) as error:
        raise damaged(checkpoint.folder, error) from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return _read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise ModelLoadFailed(
            f"There is no config.json in {folder}.",
            hint="Give the folder that holds config.json, model.safetensors and tokenizer.json.",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadFailed, FileNotFoundError."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{path} is not readable JSON.", hint="Download the checkpoint again.") from error
    if not isinstance(raw, dict):
        raise ModelLoadFailed(f"{path} holds no JSON object.", hint="Download the checkpoint again.")
    return raw


def _modern(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the original layout in the words of the native one."""
    thinker = raw["thinker_config"]
    audio = {k: v for k, v in thinker["audio_config"].items() if k not in {"max_source_positions", "conv_chunksize"}}
    audio |= {"model_type": "qwen3_asr_encoder", "max_position_embeddings": geometry.CHUNK_TOKENS}
    text = {k: v for k, v in thinker["text_config"].items() if k not in {"rope_scaling", "rope_theta"}}
    text |= {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1_000_000} | rope(thinker["text_config"])}
    modern = {
        "model_type": _MODEL_TYPE,
        "audio_config": audio,
        "text_config": text,
        "audio_token_id": thinker["audio_token_id"],
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
    }
    if "classify_num" in thinker:
        modern["num_labels"] = thinker["classify_num"]
    for key in ("timestamp_token_id", "eos_token_id", "pad_token_id"):
        if key in thinker or key in raw:
            modern[key] = thinker.get(key, raw.get(key))
    return modern


def _eos(folder: Path, config: ModelConfig) -> frozenset[int]:
    generation: dict[str, Any] = {}
    path = folder / "generation_config.json"
    if path.is_file():
        generation = _read_json(path)
    said = (msgspec.convert(generation.get("eos_token_id"), list[Id] | Id | None), config.eos_token_id)
    return frozenset(n for ids in said if ids is not None for n in ([ids] if isinstance(ids, int) else ids))


def _not_understood(name: str, error: Exception) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The configuration of {name} is not understood: {first_line(error)}",
        hint="Use Qwen/Qwen3-ASR-1.7B-hf, Qwen/Qwen3-ASR-0.6B-hf or a checkpoint of the same architecture.",
    )


def _require_known_shape(config: ModelConfig, name: str) -> None:
    """Our forward passes are written for the published architecture; anything else would be silently wrong."""
    audio, text = config.audio_config, config.text_config
    wanted = {
        "audio n_window": (audio.n_window, geometry.CHUNK_FRAMES // 2),
        "audio n_window_infer": (audio.n_window_infer, geometry.WINDOW_FRAMES),
        "audio num_mel_bins": (audio.num_mel_bins, geometry.MELS),
        "audio activation_function": (audio.activation_function, "gelu"),
        "text hidden_act": (text.hidden_act, "silu"),
        "text attention_bias": (text.attention_bias, False),
        "text rope_type": (text.rope_type, PLAIN_ROPE),
        "quantization_config": (config.quantization_config, None),
        "text sliding window": (text.use_sliding_window, False),
        "audio d_model modulo heads": (audio.d_model % audio.encoder_attention_heads, 0),
        "text heads modulo key-value heads": (text.num_attention_heads % text.num_key_value_heads, 0),
        "audio positions for a second": (
            min(audio.max_position_embeddings, geometry.CHUNK_TOKENS),
            geometry.CHUNK_TOKENS,
        ),
    }
    wrong = [
        f"{what} is {found!r}, not {expected!r}" for what, (found, expected) in wanted.items() if found != expected
    ]
    if wrong:
        raise ModelLoadFailed(
            f"{name} is not shaped like the published Qwen3-ASR: {'; '.join(wrong)}.",
            hint="Use one of the published checkpoints or one fine-tuned from them.",
        )
