"""Calls at the pace of speech: how long after the last word the final comes, how far partials are behind, and how soon the
first one comes; alone, beside a file of half an hour, and many at once.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import connect

from tests.bench.figures import Figure, percentile
from tests.bench.lanes import longest_step, reading_half_an_hour
from tests.clients.pace import at_real_time, s16, speech_only
from tests.server import Server, serving
from tests.speech import Audio, clip, silence

UTTERANCES = 30
BUSY_UTTERANCES = 8
"""Beside a file; together they have thirty partials and more, and a fast machine has not read the file before their end."""
LONGEST_S = 5.0
PAUSE_S = 1.3
SILENCE_MS = 500.0
"""The default of the setting."""
FINAL_MUST_MS, FIRST_MUST_MS = 400.0, 700.0
STREAMS = (1, 50, 100)


@dataclass
class Call:
    """What was measured in a call. Seconds."""

    finals: list[float] = field(default_factory=list)
    """From the frame with the last speech to the final, less the silence that was asked for."""
    partials: list[float] = field(default_factory=list)
    """From the moment that the last sound in it was spoken to its arrival."""
    firsts: list[float] = field(default_factory=list)
    """From the first loud sound of an utterance to its first partial."""


def measure() -> Iterator[Figure]:
    with serving(script=True, idle_seconds=3600) as server, tempfile.TemporaryDirectory() as folder:
        server.http.post(f"/api/ps/{server.ps()['model']}").raise_for_status()
        alone = asyncio.run(call(server.port, UTTERANCES))
        step = longest_step(server, Path(folder) / "segment.wav")
        beside = _beside_a_file(server, Path(folder) / "long.wav")
    seconds = f"{UTTERANCES} utterances of up to {LONGEST_S:g} s"
    yield _p95("call, end of speech to final, beyond the silence, p95", alone.finals, FINAL_MUST_MS, seconds)
    yield _p95("call, start of speech to first partial, p95", alone.firsts, FIRST_MUST_MS, seconds)
    yield _p95("call, partials behind the sound in them, p95", alone.partials, None, f"{len(alone.partials)} partials")
    bound = percentile(alone.partials, 95) + step
    note = f"{len(beside.partials)} partials; the bound is the figure above and a step of {step * 1e3:.0f} ms"
    yield _p95("the same while a 30-minute file runs, p95", beside.partials, bound * 1e3, note)
    with serving(script=True, model="scripted:live=200", idle_seconds=3600) as server:
        for streams in STREAMS:
            done = asyncio.run(calls(server.port, streams))
            firsts = [first for one in done for first in one.firsts]
            assert len(firsts) == streams, "a stream without a partial"
            what = f"{streams} calls with the scripted engine, start of speech to first partial, p95"
            yield _p95(what, firsts, None, "")


def _p95(what: str, values: list[float], must: float | None, note: str) -> Figure:
    value = percentile(values, 95) if len(values) > 1 else values[0]
    median = f"median {statistics.median(values) * 1e3:.0f} ms"
    return Figure(what, value * 1e3, "ms", must=must, note=f"{median}; {note}" if note else median)


def _utterances() -> list[Audio]:
    """Different ones, each ending with its last word."""
    short = [speech_only(clip(name)) for name in ("librivox-0880", "librivox-0930")]
    return [*short, clip("librivox-0890")[: round(LONGEST_S * 16_000) - 1_600]]


def _onset(audio: Audio) -> float:
    """Seconds to the first 20 ms that are loud."""
    level = np.sqrt((audio[: len(audio) // 320 * 320].reshape(-1, 320) ** 2).mean(axis=1))
    return float(np.flatnonzero(level > 0.05 * level.max())[0]) * 0.02


async def call(port: int, utterances: int, delay: float = 0.0) -> Call:
    """At the pace of speech; it begins after ``delay`` seconds of silence."""
    measured, chosen = Call(), _utterances()
    parts, onsets, at = [silence(delay)], [], delay
    for number in range(utterances):
        audio = chosen[number % len(chosen)]
        onsets.append(at + _onset(audio))
        parts += [audio, silence(PAUSE_S)]
        at += len(audio) / 16_000 + PAUSE_S
    url = f"ws://127.0.0.1:{port}/v1/stream"
    async with connect(url, compression=None) as socket:
        began = time.monotonic()
        listening = asyncio.ensure_future(_listen(socket, began, onsets, measured))
        await at_real_time(socket.send, s16(np.concatenate(parts)), 32_000)
        await socket.send('{"type":"close"}')
        await asyncio.wait_for(listening, 60)
    return measured


async def _listen(socket: Any, began: float, onsets: list[float], call: Call) -> None:
    seen: set[int] = set()
    async for message in socket:
        event = json.loads(message)
        now = time.monotonic() - began
        if event["type"] == "partial":
            call.partials.append(now - event["end"])
            if event["utterance"] not in seen:
                seen.add(event["utterance"])
                # The utterance that began last; a late one would count for the next, and stand out.
                call.firsts.append(now - max(onset for onset in onsets if onset < now))
        elif event["type"] == "final" and event["cause"] == "silence":
            call.finals.append((event["timings"]["speech_end_to_final"] - SILENCE_MS) / 1e3)


async def calls(port: int, streams: int, utterances: int = 1, spread: float = 1.0) -> list[Call]:
    """Many that begin within ``spread`` seconds."""
    return await asyncio.gather(*(call(port, utterances, delay=spread * n / streams) for n in range(streams)))


def _beside_a_file(server: Server, path: Path) -> Call:
    reader = reading_half_an_hour(server, path)
    measured = asyncio.run(call(server.port, BUSY_UTTERANCES))
    assert reader.is_alive(), "The file ended before the call did."
    return measured
