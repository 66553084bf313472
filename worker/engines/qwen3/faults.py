"""What can be wrong with the files of a checkpoint, by name: nothing but what was published is ever run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import ModelLoadFailed

_SHOWN_KEYS = 8


def require_complete(
    folder: Path, *, missing: Sequence[str], unexpected: Sequence[str], misshaped: Sequence[str]
) -> None:
    """Raises ModelLoadFailed with the names of weights that are not as the configuration says."""
    faults = []
    for word, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped)):
        if keys:
            faults.append(f"{word}: {_some(keys)}")
    if faults:
        raise ModelLoadFailed(
            f"The weights in {folder} do not fit their configuration ({'; '.join(faults)}).",
            hint="Nothing was loaded, because the model would be partly random. Download the checkpoint again.",
        )


def require_numbers(folder: Path, spoiled: Sequence[str]) -> None:
    """Raises ModelLoadFailed with the names of weights in which there is something else than finite numbers."""
    if spoiled:
        raise ModelLoadFailed(
            f"Weights in {folder} are not finite: {_some(spoiled)}.",
            hint="Nothing was loaded, because every answer would be wrong. Download the checkpoint again.",
        )


def damaged(folder: Path, error: Exception) -> ModelLoadFailed:
    """Weights that no program could read."""
    return ModelLoadFailed(
        f"The weights in {folder} could not be read: {first_line(error)}",
        hint="Delete the folder and download the checkpoint again; a copy that was cut short looks like this.",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(sorted(names)[:_SHOWN_KEYS]) + more


def first_line(error: BaseException) -> str:
    """Of what an error says, within bounds."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
