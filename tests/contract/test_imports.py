"""Arrows between the packages: gateway -> shared <- worker, and what each may drag in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "av", "google", "hypothesis", "jinja2", "moonshine_voice", "numpy", "onnxruntime", "pandas", "pydantic", "requests",
    "safetensors", "scipy", "silero_vad", "soxr", "tokenizers", "torch", "torchaudio", "transformers", "worker",
}  # fmt: skip
LAZY = {"httpx"}
"""Imported when first needed; an idle gateway never needs it."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of every import in a module, also those inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", modules("shared"), ids=lambda path: path.stem)
def test_shared_is_stdlib_and_msgspec(path: Path) -> None:
    assert imported(path) <= {*sys.stdlib_module_names, "msgspec", "shared"}


@pytest.mark.parametrize("path", modules("gateway"), ids=lambda path: path.stem)
def test_gateway_names_nothing_heavy(path: Path) -> None:
    assert not imported(path) & HEAVY


@pytest.mark.parametrize("path", modules("worker"), ids=lambda path: str(path.relative_to(ROOT)))
def test_worker_never_names_the_gateway(path: Path) -> None:
    assert "gateway" not in imported(path)


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_a_running_gateway_loads_nothing_heavy() -> None:
    """Through all its dependencies, not only in its own words."""
    loaded = loaded_by("import gateway.app, gateway.cli")
    assert not loaded & HEAVY
    assert not loaded & LAZY


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_by("import gateway.app, numpy")
