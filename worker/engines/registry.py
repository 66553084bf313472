"""From a model's name to its engine. Engines are imported only when they are chosen: each drags its own libraries."""

from __future__ import annotations

from shared.errors import ModelLoadFailed
from worker.engines.base import Engine

EMBEDDED = "embedded"
SCRIPTED = "scripted"


def create(model: str, threads: int) -> Engine:
    """The engine of ``embedded``, ``scripted[:options]``, a hub id or a folder. Raises ModelLoadFailed."""
    try:
        if model == EMBEDDED:
            from worker.engines.embedded import EmbeddedEngine

            return EmbeddedEngine(threads=threads)
        if model.partition(":")[0] == SCRIPTED:
            from worker.engines.scripted import ScriptedEngine, ScriptedOptions

            return ScriptedEngine(ScriptedOptions.parse(model.partition(":")[2]))
        from worker.engines.qwen3.engine import Qwen3Engine

        return Qwen3Engine(model, threads=threads)
    except ImportError as error:
        extra = EMBEDDED if model == EMBEDDED else "qwen"
        raise ModelLoadFailed(
            f"The engine of {model!r} needs a package that is not installed: {error}.",
            hint=f"pip install 'napscribe[{extra}]'",
        ) from error
    except ValueError as error:
        raise ModelLoadFailed(f"The model {model!r} cannot be meant: {error}") from error
