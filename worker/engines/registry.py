"""From a model's name to its engine. Engines are imported only when they are chosen: each drags its own libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.errors import ModelLoadFailed
from worker.engines.base import Engine

EMBEDDED = "embedded"
SCRIPTED = "scripted"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator chose, for engines that know what to do with it."""

    threads: int = 0
    """CPU threads; 0 is the engine's choice."""
    near_gpu: bool = False
    """Keep this process to the cores on the card's NUMA node."""
    gpu_memory_mb: int = 0
    """Bound on weights, slots and working memory; 0 is what is free."""
    memory_share: float = 1.0
    """Of what is free, where there is no bound: a second model needs some, too."""
    aligner: str = ""
    """Hub id or folder of a forced aligner; empty for none."""
    live_model: str = ""
    """A smaller model for the partials of calls; empty for none."""
    wake: Callable[[], None] = lambda: None
    """To be called, from any thread, when a sequence has become ready without a call of the scheduler's."""


def create(model: str, options: EngineOptions) -> Engine:
    """The engine of a model, or of a pair of models (``live_model``). Raises ModelLoadFailed."""
    if not options.live_model or options.live_model == model:
        return _single(model, options)
    from worker.engines.pair import PairEngine

    # The second takes what the first has left; finals, and so exact times, are the first's.
    main, small = replace(options, memory_share=0.5), replace(options, aligner="")
    return PairEngine(_single(model, main), _single(options.live_model, small, live=True))


def _single(model: str, options: EngineOptions, *, live: bool = False) -> Engine:
    """The engine of ``embedded``, ``scripted[:options]``, a hub id or a folder. Raises ModelLoadFailed."""
    try:
        if model == EMBEDDED:
            from worker.engines.embedded import EmbeddedEngine

            return EmbeddedEngine(threads=options.threads)
        if model.partition(":")[0] == SCRIPTED:
            from worker.engines.scripted import ScriptedEngine, ScriptedOptions

            return ScriptedEngine(ScriptedOptions.parse(model.partition(":")[2]))
        from worker.engines.qwen3.engine import Qwen3Engine
        from worker.engines.qwen3.hub import LIVE_MODEL, MODEL

        return Qwen3Engine(
            model,
            threads=options.threads,
            near_gpu=options.near_gpu,
            gpu_memory_mb=options.gpu_memory_mb,
            memory_share=options.memory_share,
            aligner=options.aligner,
            wake=options.wake,
            setting=LIVE_MODEL if live else MODEL,
        )
    except ImportError as error:
        extra = EMBEDDED if model == EMBEDDED else "qwen"
        raise ModelLoadFailed(
            f"The engine of {model!r} needs a package that is not installed: {error}.",
            hint=f"pip install 'napscribe[{extra}]', or in a clone: pip install -e '.[{extra}]'",
        ) from error
    except ValueError as error:
        raise ModelLoadFailed(f"The model {model!r} cannot be meant: {error}") from error
