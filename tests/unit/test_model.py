"""Which model is served: by what is installed and plugged in, a folder, or a hub id."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.model import (
    ALIGNER_DEFAULT,
    EMBEDDED,
    EMBEDDED_ID,
    ServedModel,
    aligner,
    live_model,
    missing_packages,
    served_model,
)
from shared.settings import SettingsError

QWEN = "Qwen/Qwen3-ASR-1.7B-hf"
NVIDIA, WSL = "/dev/nvidiactl", "/dev/dxg"
PACKAGES = ("torch", "transformers")


def machine(patch: pytest.MonkeyPatch, devices: Iterable[str], packages: Iterable[str]) -> None:
    """Pretend to run where these device nodes and packages are."""
    real = Path.exists
    there = set(devices)

    def exists(path: Path, **how: Any) -> bool:
        return str(path) in there if str(path).startswith("/dev/") else real(path, **how)

    def find_spec(name: str, package: str | None = None) -> object:
        return SimpleNamespace(name=name) if name in set(packages) else None

    patch.setattr(Path, "exists", exists)
    patch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("device", [NVIDIA, WSL])
def test_auto_is_qwen_where_cuda_is(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    machine(monkeypatch, [device], PACKAGES)
    model = served_model("auto")
    assert model == ServedModel(QWEN, QWEN)
    assert aligner("auto", model) == ALIGNER_DEFAULT


@pytest.mark.parametrize(
    ("devices", "packages"),
    [((), PACKAGES), ((NVIDIA,), ()), ((NVIDIA,), ("torch",)), ((NVIDIA,), ("transformers",)), ((), ())],
)
def test_auto_is_embedded_elsewhere(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], packages: tuple[str, ...]
) -> None:
    machine(monkeypatch, devices, packages)
    model = served_model("auto")
    assert model == ServedModel(EMBEDDED, EMBEDDED_ID, ("en",))
    assert aligner("auto", model) == ""


def test_what_is_asked_for_is_served_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [NVIDIA], PACKAGES)
    assert served_model("embedded").spec == EMBEDDED
    machine(monkeypatch, [], [])
    assert served_model(QWEN) == ServedModel(QWEN, QWEN)
    assert aligner("auto", served_model(QWEN)) == "", "on a CPU it would take longer than the transcript"


def test_a_folder_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    expected = ServedModel(str(folder), "my-model")
    assert served_model(str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert served_model("my-model") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert served_model("~/my-model") == expected
    machine(monkeypatch, [NVIDIA], PACKAGES)
    assert aligner("auto", expected) == "", "a folder says nothing of the network"


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert served_model("owner/name") == ServedModel("owner/name", "owner/name")
    monkeypatch.chdir(tmp_path)
    assert served_model("owner/name") == ServedModel(str(tmp_path / "owner" / "name"), "name")


def test_every_model_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [], ["av", "numpy", "onnxruntime", "soxr", "torch"])
    assert missing_packages(served_model("embedded")) == ["moonshine_voice"]
    assert missing_packages(served_model(QWEN)) == ["safetensors", "tokenizers"]
    assert missing_packages(served_model("scripted")) == []


def test_scripted_is_known_by_its_kind() -> None:
    assert served_model("scripted:live=2") == ServedModel("scripted:live=2", "scripted")


@pytest.mark.parametrize(
    "setting", ["nowhere", "/no/such/folder", "a/b/c", "owner/", "owner/na me", "~nobody-of-this-name/model"]
)
def test_what_can_be_no_model_is_refused(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="NAPSCRIBE_MODEL"):
        served_model(setting)
    with pytest.raises(SettingsError, match="NAPSCRIBE_LIVE_MODEL"):
        live_model(setting)
    with pytest.raises(SettingsError, match="NAPSCRIBE_ALIGNER"):
        aligner(setting, ServedModel(QWEN, QWEN))


def test_a_live_model_is_a_folder_a_hub_id_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    assert live_model("small") == str(tmp_path / "small")
    assert [live_model(setting) for setting in ("", "embedded", "owner/small")] == ["", "embedded", "owner/small"]


@pytest.mark.parametrize(("setting", "told"), [("none", ""), ("owner/aligner", "owner/aligner")])
def test_an_aligner_may_be_named_or_left_out(setting: str, told: str) -> None:
    assert aligner(setting, ServedModel(QWEN, QWEN)) == told
