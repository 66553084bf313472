"""Which model this gateway serves, decided from the settings and what is installed, without importing any of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

EMBEDDED = "embedded"
EMBEDDED_ID = "moonshine-tiny-en"
QWEN_DEFAULT = "Qwen/Qwen3-ASR-1.7B-hf"


class ServedModel(msgspec.Struct, frozen=True):
    """One model a gateway."""

    spec: str
    """What the worker is told: ``embedded``, a hub id, a folder or ``scripted:…``."""
    id: str
    """What clients are told."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes, where they are known without the worker."""


def served_model(setting: str) -> ServedModel:
    """The model of ``NAPSCRIBE_MODEL``."""
    if setting == "auto":
        setting = QWEN_DEFAULT if _has_cuda() else EMBEDDED
    if setting == EMBEDDED:
        return ServedModel(EMBEDDED, EMBEDDED_ID, ("en",))
    if setting.startswith("scripted"):
        return ServedModel(setting, "scripted")
    path = Path(setting).expanduser()
    if path.is_dir():
        return ServedModel(str(path.absolute()), path.absolute().name)
    return ServedModel(setting, setting)


def _has_cuda() -> bool:
    """An NVIDIA device node and the packages that would use it. Importing torch to ask costs a second and 200 MB."""
    devices = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    return devices and all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
