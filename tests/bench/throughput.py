"""A worker that is there: how long a short clip takes, and how much faster than speech a long file is read."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure, percentile
from tests.bench.stages import median_stages, stages
from tests.server import ROOT, serving
from tests.speech import recital, wav, word_errors, words

CLIP = ROOT / "tests" / "data" / "librivox-0880.wav"
REQUESTS = 20
ROUNDS = 7
"""All clips in turn with pauses between them: about five minutes."""


def measure() -> Iterator[Figure]:
    with serving(script=True, idle_seconds=3600) as server, tempfile.TemporaryDirectory() as folder:
        server.transcribe(CLIP).raise_for_status()
        walls, answers = [], []
        for _ in range(REQUESTS):
            began = time.perf_counter()
            answers.append(server.transcribe(CLIP).raise_for_status())
            walls.append(time.perf_counter() - began)
        note = median_stages(answers)
        yield Figure("3 s clip, warm, median", statistics.median(walls) * 1e3, "ms", note=note)
        yield Figure("3 s clip, warm, p95", percentile(walls, 95) * 1e3, "ms")

        audio, said = recital(ROUNDS, (0.4, 0.9))
        path = Path(folder) / "recital.wav"
        path.write_bytes(wav(audio))
        answer = server.transcribe(path).raise_for_status()
        total = stages(answer)["total"] / 1e3
        heard = answer.json()["text"]
        length = len(audio) / 16_000
        errors = word_errors(said, heard) / len(words(said))
        note = f"{length:.0f} s in {total:.1f} s, word errors {errors:.1%}; {median_stages([answer])}"
        yield Figure("file, audio seconds per second", length / total, "", note=note)
