"""On hold: ten minutes in which nobody speaks cost no words and no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import talking
from tests.server import Server
from tests.speech import RATE, Audio, silence

MINUTES = 10
PIECE = 3200
"""Bytes of a message: 100 ms."""
ALLOWED_MIB = 30.0


def music(seconds: float) -> Audio:
    """Broken chords on a soft organ, as queues play them."""
    time = np.arange(round(seconds * RATE)) / RATE
    chords = ((262, 330, 392), (220, 262, 330), (175, 220, 262), (196, 247, 294))
    beat = (time // 0.5).astype(int)
    audio = np.zeros(len(time))
    for number in range(int(beat[-1]) + 1):
        note = chords[number // 6 % 4][number % 3]
        here = beat == number
        fade = np.minimum(1, (time[here] - number * 0.5) / 0.02) * np.exp(-2 * (time[here] - number * 0.5))
        audio[here] = fade * sum(np.sin(2 * np.pi * note * part * time[here]) / part**2 for part in (1, 2, 3))
    return np.asarray(0.2 * audio, np.float32)


def hum(seconds: float) -> Audio:
    """Of the mains, with its odd harmonics."""
    time = np.arange(round(seconds * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * 50 * part * time) / part for part in (1, 3, 5, 7))
    return np.asarray(0.1 * tone, np.float32)


def knocks(seconds: float) -> Audio:
    """A door, every 0.8 s: a thump that dies away in some ten milliseconds."""
    audio = silence(seconds)
    time = np.arange(RATE // 10) / RATE
    thump = (0.7 * np.exp(-time * 90) * np.sin(2 * np.pi * 110 * time)).astype(np.float32)
    for start in range(RATE // 4, len(audio) - len(thump), round(0.8 * RATE)):
        audio[start : start + len(thump)] += thump
    return audio


def memory(server: Server) -> float:
    """What the worker holds, MiB."""
    lines = Path(f"/proc/{server.worker_pid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def test_ten_minutes_on_hold(server: Server) -> None:
    """Sent as fast as the socket takes them; the first minute warms up what a worker holds in any case."""
    minute = s16(np.concatenate([music(25), hum(12), knocks(13), silence(10)]))
    async with talking(server) as talk:
        await talk.until("ready")
        before = 0.0
        for number in range(MINUTES):
            for start in range(0, len(minute), PIECE):
                await talk.socket.send(minute[start : start + PIECE])
            if not number:
                await talk.control("finalize")
                assert (await talk.until("finalized"))["utterance"] is None
                before = memory(server)
        await talk.control("finalize")
        assert (await talk.until("finalized", 2))["utterance"] is None
        grown = memory(server) - before
        await talk.close()
    assert {event["type"] for event in talk.events} == {"ready", "finalized", "done"}, talk.events
    assert talk.of("done")[0]["duration"] == pytest.approx(MINUTES * 60, abs=0.01)
    assert talk.socket.close_code == 1000
    assert grown < ALLOWED_MIB
