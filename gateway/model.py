"""Which model this gateway serves, decided from the settings and what is installed, without importing any of it."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.devices import nvidia_there
from shared.settings import SettingsError

EMBEDDED = "embedded"
EMBEDDED_ID = "moonshine-tiny-en"
SCRIPTED = "scripted"
_PACKAGES = {
    "": ("av", "numpy", "onnxruntime", "soxr"),
    EMBEDDED: ("av", "moonshine_voice", "numpy", "onnxruntime", "soxr"),
    "qwen": ("av", "numpy", "onnxruntime", "safetensors", "soxr", "tokenizers", "torch"),
}
"""What the worker imports before it is ready, by extra."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
QWEN_DEFAULT = "Qwen/Qwen3-ASR-1.7B-hf"
ALIGNER_DEFAULT = "Qwen/Qwen3-ForcedAligner-0.6B-hf"


class ServedModel(msgspec.Struct, frozen=True):
    """One model a gateway."""

    spec: str
    """What the worker is told: ``embedded``, a hub id, a folder or ``scripted:…``."""
    id: str
    """What clients are told."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes, where they are known without the worker."""

    @property
    def extra(self) -> str:
        """The extra of this package that brings what the model's engine needs; empty for none."""
        if self.spec.startswith(SCRIPTED):
            return ""
        return EMBEDDED if self.spec == EMBEDDED else "qwen"


def served_model(setting: str) -> ServedModel:
    """The model of ``NAPSCRIBE_MODEL``. Raises SettingsError for what can be none."""
    if setting == "auto":
        setting = QWEN_DEFAULT if _has_cuda() else EMBEDDED
    if setting == EMBEDDED:
        return ServedModel(EMBEDDED, EMBEDDED_ID, ("en",))
    if setting.startswith(SCRIPTED):
        return ServedModel(setting, SCRIPTED)
    checkpoint = _checkpoint("NAPSCRIBE_MODEL", setting, "auto, embedded")
    folder = Path(checkpoint)
    return ServedModel(checkpoint, folder.name if folder.is_absolute() else checkpoint)


def live_model(setting: str) -> str:
    """What the worker is told of ``NAPSCRIBE_LIVE_MODEL``. Raises SettingsError for what can be none."""
    if not setting or setting == EMBEDDED or setting.startswith(SCRIPTED):
        return setting
    return _checkpoint("NAPSCRIBE_LIVE_MODEL", setting, "empty")


def _checkpoint(name: str, setting: str, besides: str) -> str:
    """A folder as an absolute path, or a hub id. ``besides``: what else the setting may be. Raises SettingsError."""
    with suppress(RuntimeError):  # ~somebody who is not there
        path = Path(setting).expanduser()
        if path.is_dir():
            return str(path.absolute())
    if not _HUB_ID.fullmatch(setting):
        raise SettingsError(
            f"{name}={setting!r}: there is no such folder, and it is neither {besides.replace(', ', ' nor ')} nor a hub id (owner/name)."
        )
    return setting


def aligner(setting: str, model: ServedModel) -> str:
    """What the worker is told of ``NAPSCRIBE_ALIGNER``: a hub id, a folder, or nothing. Raises SettingsError for what can be none.

    The published aligner is chosen for a published model on a GPU only: a folder says nothing of the network, and on a
    CPU it would take longer than the transcript.
    """
    if setting == "auto":
        published = model.spec.startswith("Qwen/") and _has_cuda()
        return ALIGNER_DEFAULT if published else ""
    return "" if setting == "none" else _checkpoint("NAPSCRIBE_ALIGNER", setting, "auto, none")


def missing_packages(model: ServedModel) -> list[str]:
    """Names of packages that the worker will want and that are not installed."""
    return [name for name in _PACKAGES[model.extra] if importlib.util.find_spec(name) is None]


def _has_cuda() -> bool:
    """An NVIDIA device node and the packages that would use it."""
    return nvidia_there() and all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
