"""What every test here needs: torch, and a CUDA device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the `qwen` extra")
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
