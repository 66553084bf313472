"""Nothing but the published weights is ever run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadFailed
from tests.torch.checkpoints import to_original_layout
from tests.torch.running import loaded, noise, transcribe
from worker.engines.pair import PairEngine
from worker.engines.qwen3.checkpoint import open_checkpoint
from worker.engines.qwen3.device import Device, encoder_chunks, free_bytes
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.hub import ALIGNER, LIVE_MODEL, MODEL, Setting
from worker.engines.qwen3.weights import load_recogniser
from worker.engines.registry import EngineOptions, create

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def silent(phase: str, fraction: float) -> None:
    return None


def test_original_layout_is_bit_equal(random_checkpoint: Path, tmp_path: Path) -> None:
    old = open_checkpoint(str(to_original_layout(random_checkpoint, tmp_path / "old")), silent)
    new = open_checkpoint(str(random_checkpoint), silent)
    assert old.original_layout
    assert not new.original_layout
    ours, theirs = (load_recogniser(found, CPU, torch.float32, silent).state_dict() for found in (old, new))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_original_layout_transcribes_alike(random_checkpoint: Path, tmp_path: Path) -> None:
    clip = noise(2.0)
    texts = []
    for folder in (random_checkpoint, to_original_layout(random_checkpoint, tmp_path / "old")):
        engine = loaded(folder, max_slots=1)
        texts.append(transcribe(engine, clip, language="de"))
        engine.close()
    assert texts[0].text == texts[1].text
    assert texts[0].avg_logprob == texts[1].avg_logprob


@pytest.mark.parametrize("layout", ["native", "original"])
@pytest.mark.parametrize("fault", ["missing", "unexpected", "mis-shaped"])
def test_weights_that_do_not_fit_stop_the_start(
    random_checkpoint: Path, tmp_path: Path, layout: str, fault: str
) -> None:
    folder = tmp_path / "broken"
    if layout == "native":
        shutil.copytree(random_checkpoint, folder)
    else:
        to_original_layout(random_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    key = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    if fault == "missing":
        del weights[key]
    elif fault == "unexpected":
        weights[key.replace("up_proj", "sideways_proj")] = weights[key].clone()
    else:
        weights[key] = weights[key][:5].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed) as caught:
        Qwen3Engine(str(folder), device="cpu", threads=1).load(silent)
    name = "sideways_proj" if fault == "unexpected" else "layers.1.mlp.up_proj.weight"
    assert name in caught.value.message
    assert caught.value.hint


def test_truncated_weights(random_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(random_checkpoint, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ModelLoadFailed, match="could not be read"):
        Qwen3Engine(str(folder), device="cpu", threads=1).load(silent)


@pytest.mark.parametrize("kind", ["added", "plain"])
def test_a_tokenizer_of_a_bigger_model_stops_the_start(random_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """On a GPU, text with such a token would end the process."""
    folder = tmp_path / "other"
    shutil.copytree(random_checkpoint, folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    if kind == "added":
        parts["added_tokens"].append({**parts["added_tokens"][-1], "id": rows, "content": "<one_more>"})
    else:
        vocabulary = parts["model"]["vocab"]
        vocabulary.update({token["content"]: token["id"] for token in parts["added_tokens"]})
        vocabulary.update({f"more{n}": n for n in range(len(vocabulary), rows + 1)})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ModelLoadFailed, match=f"only {rows} rows") as caught:
        Qwen3Engine(str(folder), device="cpu", threads=1).load(silent)
    assert caught.value.hint


def test_other_architectures_are_refused(random_checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((random_checkpoint / "config.json").read_text())
    for change, word in (
        ({"model_type": "whisper"}, "whisper"),
        ({"audio_config": {**config["audio_config"], "n_window_infer": 400}}, "n_window_infer"),
        ({"text_config": {**config["text_config"], "attention_bias": True}}, "attention_bias"),
    ):
        folder = tmp_path / word
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelLoadFailed, match=word):
            open_checkpoint(str(folder), silent)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("audio_config", "encoder_attention_heads", 0),
        ("audio_config", "encoder_attention_heads", 3),
        ("audio_config", "d_model", -256),
        ("audio_config", "encoder_layers", 10**5),
        ("audio_config", "encoder_ffn_dim", 10**30),
        ("audio_config", "max_position_embeddings", 5),
        ("audio_config", "max_position_embeddings", 10**8),
        ("text_config", "num_attention_heads", -4),
        ("text_config", "num_key_value_heads", 3),
        ("text_config", "head_dim", 0),
        ("text_config", "vocab_size", -1),
        ("text_config", "num_hidden_layers", 10**5),
        ("", "eos_token_id", 10**10),
    ],
)
def test_a_configuration_that_can_be_no_models_is_refused_at_once(
    random_checkpoint: Path, tmp_path: Path, part: str, name: str, value: int
) -> None:
    """Before anything is allocated for it."""
    config = json.loads((random_checkpoint / "config.json").read_text())
    (config[part] if part else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed) as caught:
        open_checkpoint(str(tmp_path), silent)
    assert caught.value.hint


@pytest.mark.parametrize("body", ["[" * 100_000, "[]", '{"weight_map": null}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_is_none(random_checkpoint: Path, tmp_path: Path, body: str) -> None:
    folder = tmp_path / "parts"
    shutil.copytree(random_checkpoint, folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(body)
    with pytest.raises(ModelLoadFailed) as caught:
        Qwen3Engine(str(folder), device="cpu", threads=1).load(silent)
    assert caught.value.hint


@pytest.mark.parametrize("setting", [MODEL, LIVE_MODEL, ALIGNER], ids=lambda setting: setting.name)
def test_errors_name_the_setting_that_is_meant(tmp_path: Path, setting: Setting) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelLoadFailed) as caught:
            open_checkpoint(str(place), silent, setting)
        assert setting.name in caught.value.hint
        assert setting is MODEL or MODEL.name not in str(caught.value)


def test_a_live_model_is_the_one_that_is_meant(random_checkpoint: Path, tmp_path: Path) -> None:
    options = EngineOptions(threads=1, live_model=str(tmp_path / "absent"))
    with pytest.raises(ModelLoadFailed, match="absent") as caught:
        create(str(random_checkpoint), options).load(silent)
    assert "NAPSCRIBE_LIVE_MODEL" in caught.value.hint


def test_places_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadFailed, match=r"no config\.json"):
        open_checkpoint(str(tmp_path / "empty"), silent)
    with pytest.raises(ModelLoadFailed, match="no folder"):
        open_checkpoint(str(tmp_path / "absent"), silent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadFailed, match="HF_HUB_OFFLINE is set") as caught:
        open_checkpoint("Qwen/Qwen3-ASR-0.6B-hf", silent)
    assert "hf download" in caught.value.hint
    assert caught.value.retry_after is None, "it does not pass"


def test_memory_bound_decides_the_slots(random_checkpoint: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="nothing is left"):
        loaded(random_checkpoint, gpu_memory_mb=1, slot_length=8192)
    engine = Qwen3Engine(str(random_checkpoint), device="cpu", threads=1, gpu_memory_mb=9)
    capabilities = engine.load(silent)
    # 3 layers x 2 (key, value) x 2 heads x 32 x 4 bytes x 1280 positions = 1.875 MiB a slot, beside 1 MiB of weights.
    assert capabilities.slots == 4
    assert capabilities.max_live == 3
    engine.close()


@pytest.mark.parametrize(("slots", "calls"), [(4, 3), (310, 300)])
def test_more_calls_than_the_server_carries_are_not_taken(random_checkpoint: Path, slots: int, calls: int) -> None:
    """However much memory there is; and one slot stays with files."""
    engine = Qwen3Engine(str(random_checkpoint), device="cpu", threads=1, max_slots=slots)
    found = engine.load(silent)
    engine.close()
    assert (found.slots, found.max_live) == (slots, calls)


def test_a_pair_shares_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of 24 GB: 1.7B leaves the 0.6B model room for its weights and for about as many rows as it has itself."""
    gib, card = 1 << 30, Device(torch.device("cuda"), torch.bfloat16, 2)
    left = 24 * gib

    def load(weights: float, share: float) -> float:
        nonlocal left
        left -= int(weights * gib)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (left, 24 * gib))
        slots = free_bytes(card, bound_mb=0, held=int(weights * gib), share=share, chunks=encoder_chunks(card, 0))
        left -= slots
        return slots / gib

    engine = create("main", EngineOptions(live_model="small"))
    assert isinstance(engine, PairEngine)
    main, small = (part._gpu_memory for part in (engine._main, engine._small) if isinstance(part, Qwen3Engine))
    assert main == (0, 0.5)
    assert small == (0, 1.0)
    first, second = load(3.8, main[1]), load(1.5, small[1])
    assert 6 < first < second < 9


def test_a_pair_shares_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 GB are enough for 1.7B and 0.6B together: the second has all that the first and its weights have left."""
    gib, card = 1 << 30, Device(torch.device("cuda"), torch.bfloat16, 2)
    engine = create("main", EngineOptions(live_model="small", gpu_memory_mb=12 * 1024, aligner="words"))
    assert isinstance(engine, PairEngine)
    parts = [part for part in (engine._main, engine._small) if isinstance(part, Qwen3Engine)]
    assert [part._aligner_name for part in parts] == ["words", ""], "finals are the main model's"
    held, rooms = 0, []
    for part, weights in zip(parts, (3.8, 1.5), strict=True):
        bound, share = part._gpu_memory
        held += int(weights * gib)
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda *_, held=held: held)
        chunks = encoder_chunks(card, bound)
        assert chunks == 64, "memory is worth more as slots"
        rooms.append(free_bytes(card, bound_mb=bound, held=int(weights * gib), share=share, chunks=chunks))
        held += rooms[-1]
    assert min(rooms) > 0.5 * gib
    # What is in use at once, as measured, besides weights and slots.
    assert held <= 12 * gib - 1.8 * 10**9


def test_a_model_that_does_not_run_stops_the_start(random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be ready, and fail everything."""

    def broken(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(Encoder, "__call__", broken)
    with pytest.raises(ModelLoadFailed, match="does not run"):
        loaded(random_checkpoint)
