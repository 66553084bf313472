"""The recogniser's loading against transformers' own: the same names, shapes, values, configuration, tokens and filters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadFailed
from tests.gpu.bench_qwen3 import published_config
from tests.torch.checkpoints import to_original_layout
from worker.engines.qwen3.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from worker.engines.qwen3.config import parse
from worker.engines.qwen3.mel import mel_bank
from worker.engines.qwen3.vocabulary import Vocabulary
from worker.engines.qwen3.weights import Recogniser, load_recogniser, sinusoids

pytestmark = pytest.mark.torch

hugging: Any = transformers
CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
TEXTS = (
    "Hello, world! It's 5:30 p.m. — naïve façade, Straße, piñata.",
    "你好，世界。今天天气怎么样？",
    "こんにちは、世界！東京タワーは３３３メートルです。",
    "안녕하세요, 반갑습니다.",
    "Привет, как дела? Καλημέρα! مرحبا بالعالم नमस्ते สวัสดีครับ",
    "e\u0301 \u1e9b\u0323 \ufb01 \u212b 👩‍👩‍👧‍👦 🇩🇪 \t\n  two  spaces \r\n",
    "<|im_start|>system <asr_text>nothing<|im_end|>",
)


def silent(phase: str, fraction: float) -> None:
    return None


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), silent)


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Recogniser:
    return load_recogniser(opened(folder), CPU, dtype, silent)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return hugging.Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=dtype)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["random_checkpoint", "trained"])
def test_every_weight_is_theirs(request: pytest.FixtureRequest, which: str, dtype: torch.dtype) -> None:
    folder: Path = request.getfixturevalue(which)
    model, reference = ours(folder, dtype), theirs(folder, dtype)
    assert same(dict(model.state_dict()), dict(reference.state_dict()))
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight, "tied weights are one tensor"
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize("size", ["0.6B", "1.7B"])
def test_published_shapes(size: str) -> None:
    """On no device: names and shapes of the whole model as transformers makes it."""
    config = hugging.Qwen3ASRConfig(**published_config(size))
    with torch.device("meta"):
        reference = hugging.Qwen3ASRForConditionalGeneration(config)
        model = Recogniser(parse(json.loads(config.to_json_string(use_diff=False))))
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (model, reference)]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 500


@pytest.mark.parametrize("layout", ["native", "original"])
def test_files_of_a_large_checkpoint(random_checkpoint: Path, tmp_path: Path, layout: str) -> None:
    """Cut into several, with an index beside them, as the hub has those of the 1.7B model."""
    folder = tmp_path / "cut"
    (shutil.copytree if layout == "native" else to_original_layout)(random_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    place: dict[str, str] = {}
    for part in range(3):
        file = f"model-0000{part + 1}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[part::3]}, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names[part::3], file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": place}))
    assert same(dict(ours(folder).state_dict()), dict(ours(random_checkpoint).state_dict()))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match="could not be read"):
        ours(folder)


def without(weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (lambda w: w | {HEAD: w[EMBEDDING].clone()}, True),
        (lambda w: w | {HEAD: w[EMBEDDING] + 1}, False),
        (lambda w: without(w | {HEAD: w[EMBEDDING].clone()}, EMBEDDING), True),
    ],
    ids=["both, alike", "both, different", "the head alone"],
)
def test_the_two_ends_are_tied_where_transformers_ties_them(
    random_checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], tied: bool
) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(random_checkpoint, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    model = ours(folder)
    assert same(dict(model.state_dict()), dict(theirs(folder).state_dict()))
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied


def test_without_a_file_of_weights(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    shutil.copytree(random_checkpoint, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"no model\.safetensors"):
        ours(folder)


def test_an_untied_head_must_be_there(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "untied"
    shutil.copytree(random_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelLoadFailed, match=r"missing: lm_head\.weight"):
        ours(folder)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize("which", ["random_checkpoint", "trained", "0.6B", "1.7B"])
def test_the_configuration_is_read_as_theirs(request: pytest.FixtureRequest, which: str) -> None:
    if which[0].isdigit():
        raw = json.loads(hugging.Qwen3ASRConfig(**published_config(which)).to_json_string(use_diff=False))
    else:
        raw = json.loads((request.getfixturevalue(which) / "config.json").read_text())
    config, reference = parse(raw), hugging.Qwen3ASRConfig.from_dict(raw)
    for part, other in ((config.audio_config, reference.audio_config), (config.text_config, reference.text_config)):
        for field in type(part).__struct_fields__:
            theirs = other.rope_parameters[field] if field.startswith("rope_") else getattr(other, field)
            assert getattr(part, field) == theirs, field
    assert config.tie_word_embeddings == reference.tie_word_embeddings


@pytest.mark.parametrize("field", ["eos_token_id", "tie_word_embeddings"])
def test_what_is_left_out_means_what_it_means_to_transformers(random_checkpoint: Path, field: str) -> None:
    raw = json.loads((random_checkpoint / "config.json").read_text())
    raw.pop(field, None)
    found, meant = getattr(parse(raw), field), getattr(hugging.Qwen3ASRConfig.from_dict(raw), field)
    assert found == meant or field == "eos_token_id"  # their default is the published vocabulary's, known by name here


@pytest.mark.parametrize("part", ["audio_config", "text_config"])
def test_defaults_of_the_parts_are_theirs(random_checkpoint: Path, part: str) -> None:
    raw = json.loads((random_checkpoint / "config.json").read_text())
    kind = type(getattr(parse(raw), part))
    for field in {*kind.__struct_fields__} - {"rope_theta", "rope_type"}:
        cut = {key: value for key, value in raw[part].items() if key != field}
        try:
            found = getattr(getattr(parse({**raw, part: cut}), part), field)
        except msgspec.ValidationError as error:
            assert field in str(error), "required here"
            continue
        assert found == getattr(getattr(hugging.Qwen3ASRConfig.from_dict({**raw, part: cut}), part), field), field


PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("layout", ["native", "original"])
@pytest.mark.parametrize(
    ("said", "theta"),
    [
        ({"rope_parameters": PLAIN}, 5e5),
        ({"rope_parameters": {"rope_theta": 500_000}}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}}, 5e5),
        ({"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 1e6}}, "linear"),
        ({"rope_parameters": PLAIN, "rope_scaling": YARN}, "yarn"),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "wide"}}, "rope_theta"),
    ],
)
def test_the_rotary_embedding_is_the_plain_one_or_nothing_starts(
    random_checkpoint: Path, tmp_path: Path, layout: str, said: dict[str, Any], theta: float | str
) -> None:
    folder = tmp_path / "rope"
    (shutil.copytree if layout == "native" else to_original_layout)(random_checkpoint, folder)
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] if layout == "native" else raw["thinker_config"]["text_config"]
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        text.pop(key, None)
    text |= said
    (folder / "config.json").write_text(json.dumps(raw))
    if isinstance(theta, str):
        with pytest.raises(ModelLoadFailed, match=theta):
            opened(folder)
    else:
        assert opened(folder).config.text_config.rope_theta == theta


def test_without_a_rotary_base_nothing_starts(random_checkpoint: Path, tmp_path: Path) -> None:
    raw = json.loads((random_checkpoint / "config.json").read_text())
    del raw["text_config"]["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadFailed, match="rope_theta"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"thinker_config": None}, {"thinker_config": {}}, {"thinker_config": {"audio_config": {}, "text_config": {}}}],
    ids=["null", "empty", "without ids"],
)
def test_an_original_configuration_that_is_cut_short(
    random_checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_asr"} | change))
    with pytest.raises(ModelLoadFailed, match="not understood"):
        opened(tmp_path)


def test_a_whole_file_counts_before_an_index(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stale"
    shutil.copytree(random_checkpoint, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert same(dict(ours(folder).state_dict()), dict(theirs(folder).state_dict()))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadFailed, match="no JSON object"):
        ours(folder)


def test_what_follows_from_the_configuration_may_be_stored(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "frequencies"
    shutil.copytree(random_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.language_model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert same(dict(ours(folder).state_dict()), dict(ours(random_checkpoint).state_dict()))


def test_quantised_weights_are_refused(random_checkpoint: Path, tmp_path: Path) -> None:
    raw = json.loads((random_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "quanto"}}))
    with pytest.raises(ModelLoadFailed, match="quantization_config"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"audio_config": None}, "audio_config"),
        ({"text_config": {"hidden_size": "wide"}}, "text_config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(
    random_checkpoint: Path, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    raw = json.loads((random_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ModelLoadFailed, match=word) as caught:
        opened(tmp_path)
    assert "not understood" in caught.value.message


def test_tokens_that_end_a_text(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ends"
    shutil.copytree(random_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert opened(folder).eos == {7, 8, 9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "8"}))
    with pytest.raises(ModelLoadFailed, match="not understood"):
        opened(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadFailed, match=r"generation_config\.json"):
        opened(folder)


# ---------------------------------------------------------------- tokens, filters, positions


@pytest.mark.parametrize("which", ["random_checkpoint", "trained"])
def test_tokens_are_theirs(request: pytest.FixtureRequest, which: str) -> None:
    folder: Path = request.getfixturevalue(which)
    tokenizer, reference = load_tokenizer(opened(folder)), hugging.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text, add_special_tokens=False)
    assert {n: token.content for n, token in tokenizer.get_added_tokens_decoder().items()} == {
        n: str(token) for n, token in reference.added_tokens_decoder.items()
    }
    ids = range(len(reference))
    assert [tokenizer.id_to_token(n) for n in ids] == reference.convert_ids_to_tokens(list(ids))


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # transformers 5.15 reads parts that way
def test_a_tokenizer_in_parts(trained: Path, tmp_path: Path) -> None:
    """As the first published checkpoints have it: no tokenizer.json, but what it is made of."""
    folder = tmp_path / "parts"
    shutil.copytree(trained, folder)
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), "utf-8")
    added = json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["added_tokens_decoder"] = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    whole = load_tokenizer(opened(trained))
    (folder / "tokenizer.json").unlink()
    parts = load_tokenizer(opened(folder))
    for text in TEXTS:
        assert parts.encode(text, add_special_tokens=False).ids == whole.encode(text, add_special_tokens=False).ids
    assert Vocabulary(parts).text_tag == Vocabulary(whole).text_tag


def test_filters_are_theirs() -> None:
    from transformers.audio_utils import mel_filter_bank

    bank: Any = mel_filter_bank(201, 128, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    assert np.abs(mel_bank() - bank.T).max() <= 1e-12 * bank.max()
    assert np.array_equal(mel_bank().astype(np.float32), bank.T.astype(np.float32))


@pytest.mark.parametrize("width", [64, 256, 896, 1024])
def test_positions_are_theirs(width: int) -> None:
    from transformers.models.qwen3_asr import modeling_qwen3_asr

    module: Any = modeling_qwen3_asr
    reference = module.SinusoidsPositionEmbedding(13, width)
    assert torch.equal(sinusoids(13, width), reference.positional_embedding)


def test_a_start_imports_little(trained: Path) -> None:
    """Each of these takes longer to import than a model to load."""
    code = (
        "import sys\nfrom worker.engines.qwen3.engine import Qwen3Engine\n"
        f"Qwen3Engine({str(trained)!r}, device='cpu', threads=1).load(lambda *_: None)\n"
        "print({'transformers', 'torch._dynamo', 'sympy', 'scipy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_stop_the_start(random_checkpoint: Path, tmp_path: Path, wrong: float) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(random_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.language_model.layers.1.mlp.up_proj.weight"][3, 4] = wrong
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"not finite: model\.language_model\.layers\.1\.mlp\.up_proj\.weight\."):
        ours(folder)


def test_whole_numbers_are_no_weights(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    shutil.copytree(random_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"up_proj\.weight is torch\.int8"):
        ours(folder)


def test_a_folder_without_a_tokenizer_says_so(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mute"
    shutil.copytree(random_checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "merges*"))
    with pytest.raises(ModelLoadFailed, match="no tokenizer") as caught:
        load_tokenizer(opened(folder))
    assert "tokenizer.json" in caught.value.hint
