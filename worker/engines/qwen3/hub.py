"""From a name to a folder: a local one, or one that the hub has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelLoadFailed
from worker.engines.base import Report
from worker.engines.qwen3.faults import first_line

RETRY_S = 60.0
"""A hub that does not answer may later."""
_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a checkpoint's name comes from: what an error says about it."""

    name: str
    published: str
    """What it may be, besides a local copy."""
    otherwise: str
    """How to do without."""


MODEL = Setting(
    "NAPSCRIBE_MODEL", "Qwen/Qwen3-ASR-1.7B-hf, Qwen/Qwen3-ASR-0.6B-hf", "NAPSCRIBE_MODEL=embedded needs no download"
)
LIVE_MODEL = Setting("NAPSCRIBE_LIVE_MODEL", "Qwen/Qwen3-ASR-0.6B-hf", "without it calls are heard by the main model")
ALIGNER = Setting(
    "NAPSCRIBE_ALIGNER", "Qwen/Qwen3-ForcedAligner-0.6B-hf", "NAPSCRIBE_ALIGNER=none estimates word times"
)


def find(name: str, report: Report, setting: Setting) -> Path:
    """The folder of ``name``, a local one or a hub id, downloaded where that is possible. Raises ModelLoadFailed, with
    ``retry_after`` where the hub does not answer."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelLoadFailed(
            f"There is no folder {name}.",
            hint=f"{setting.name} is a hub id ({setting.published}) or a folder; {setting.otherwise}.",
        )
    return _download(name, report, setting)


def _download(name: str, report: Report, setting: Setting) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    report("downloading", 0.0)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, tqdm_class=_progress(report)))
    except RepositoryNotFoundError as error:
        raise ModelLoadFailed(
            f"The hub has no model {name}, or it is not public.",
            hint=f"Check {setting.name}; for a gated model set HF_TOKEN.",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        offline = bool(os.environ.get("HF_HUB_OFFLINE"))
        because = "HF_HUB_OFFLINE is set and" if offline else "The hub cannot be reached and"
        raise ModelLoadFailed(
            f"{because} {name} is not in the cache ({first_line(error)}).",
            hint=f"Download it where there is a network (hf download {name} --local-dir DIR), "
            f"and set {setting.name} to that folder; {setting.otherwise}.",
            retry_after=None if offline else RETRY_S,
        ) from error


def _progress(report: Report) -> Any:
    """A silent progress bar class that turns downloaded parts into signs of life."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Beat(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.seen = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self.seen += n or 0
            report("downloading", min(self.seen / self.total, 1.0) if self.total else 0.0)
            return None

    return Beat
