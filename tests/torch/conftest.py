"""Fixtures with a loaded engine and its reference. Modules here are skipped, unimported, where the extra is missing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.torch.running import Reference
    from worker.engines.qwen3.engine import Qwen3Engine

TRAINED = Path(__file__).parents[1] / "data" / "qwen3-asr-tiny"
_MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]


class _WithoutTorch(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs the `qwen` extra ({', '.join(_MISSING)} missing)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not _MISSING:
        return None
    module: pytest.Module = _WithoutTorch.from_parent(parent, path=module_path)
    return module


@pytest.fixture(scope="session")
def trained() -> Path:
    return TRAINED


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.torch.checkpoints import build_random

    return build_random(tmp_path_factory.mktemp("random") / "native")


@pytest.fixture(scope="session")
def trained_reference(trained: Path) -> Reference:
    from tests.torch.running import Reference

    return Reference(trained)


@pytest.fixture(scope="session")
def random_reference(random_checkpoint: Path) -> Reference:
    from tests.torch.running import Reference

    return Reference(random_checkpoint)


@pytest.fixture(scope="session")
def trained_engine(trained: Path) -> Iterator[Qwen3Engine]:
    from tests.torch.running import loaded

    engine = loaded(trained, max_slots=4)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def random_engine(random_checkpoint: Path) -> Iterator[Qwen3Engine]:
    from tests.torch.running import loaded

    engine = loaded(random_checkpoint, max_slots=4)
    yield engine
    engine.close()
