"""Two models on one card: each encodes what it hears, once, and the final tells how much both did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import Lane
from tests.torch.running import loaded, read_audio
from tests.torch.test_samples import WAVES
from worker.engines.base import Final, SequenceRequest
from worker.engines.pair import PairEngine
from worker.engines.qwen3.engine import Qwen3Engine

pytestmark = pytest.mark.torch

LONG = read_audio(next(wave for wave in WAVES if wave.stem.startswith("long")))
WINDOW = 8 * 16_000


@pytest.fixture
def models(trained: Path) -> Iterator[tuple[Qwen3Engine, Qwen3Engine]]:
    pair = loaded(trained, max_slots=2), loaded(trained, max_slots=2)
    yield pair
    for model in pair:
        model.close()


def test_windows_are_counted_by_model(models: tuple[Qwen3Engine, Qwen3Engine]) -> None:
    main, small = models
    pair = PairEngine(main, small)
    row = pair.open(SequenceRequest("call", Lane.LIVE, language="en", partials=True))
    sound, updates, final = LONG[: 2 * WINDOW + 16_000], 0, None
    for start in range(0, len(sound), 16_000):
        pair.feed(row, sound[start : start + 16_000])
        while row.ready:
            pair.step([row], 0)
        updates += 1
    assert main.encoder.encoded == 0
    listened = small.encoder.encoded
    pair.finish(row)
    while final is None:
        final = next((event for event in pair.step([row], 0) if isinstance(event, Final)), None)
    # Closed windows once; of the open one as much as there was, at every update.
    assert 2 < listened <= updates + 2
    assert main.encoder.encoded == 3
    assert (final.work.windows, final.work.windows_listening) == (3, listened)
