"""What is decided about the device, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from worker.cores import usable_cores
from worker.engines.qwen3 import device

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_torch_has_the_cores_that_there_are() -> None:
    """Some libraries set it to one when they are imported; at the next step it has its own again."""
    torch.set_num_threads(1)
    chosen = device.set_up("cpu")
    assert chosen.threads == usable_cores() == torch.get_num_threads()
    torch.set_num_threads(chosen.threads + 1)
    device.claim_threads(chosen)
    assert torch.get_num_threads() == chosen.threads


def test_the_number_of_threads_may_be_chosen() -> None:
    assert device.set_up("cpu", threads=3).threads == 3 == torch.get_num_threads()


@pytest.mark.parametrize("there", [True, False])
def test_a_card_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    monkeypatch.setattr(device, "nvidia_there", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.set_up().where.type == "cpu"
    assert ("torch cannot use it" in capsys.readouterr().err) == there
    device.set_up("cpu")
    assert "torch cannot use it" not in capsys.readouterr().err
