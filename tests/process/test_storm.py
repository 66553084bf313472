"""Everything at once, at random: callers who wait, stream, or leave, while the worker is killed, unloaded and loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter

import httpx
import pytest

from tests.process.fakes import FAKE, SEGMENT_BYTES, running, segments_text, uploads, waiting
from tests.server import events_of, serving

DOOR = "/v1/audio/transcriptions"
SECONDS = 20.0
CALLERS = 8
HONEST = {"worker_unavailable", "worker_crashed", "queue_full"}
"""Codes that a caller may get here: unloaded by force, killed twice under the same segment, too many."""


class Storm:
    """A seeded crowd. What came of it is in ``outcomes``."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.client = client
        self.chance = random.Random(seed)
        self.end = time.monotonic() + SECONDS
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(self.devil(), *(self.caller() for _ in range(CALLERS)))

    async def caller(self) -> None:
        while time.monotonic() < self.end:
            segments = self.chance.choice([1, 3, 8, 30])
            patience = self.chance.choice([60, 60, 60, self.chance.uniform(0, 0.6)])
            try:
                await asyncio.wait_for(self.ask(segments, stream=self.chance.random() < 0.4), patience)
            except TimeoutError:
                assert patience < 60, "no answer"
                self.outcomes["left"] += 1
            await asyncio.sleep(self.chance.uniform(0, 0.3))

    async def ask(self, segments: int, *, stream: bool) -> None:
        """One request, and that its answer is the whole truth or an honest error."""
        files = {"file": ("recording", bytes(SEGMENT_BYTES * segments))}
        answer = await self.client.post(DOOR, files=files, data={"stream": "true"} if stream else {})
        last = events_of(answer.text)[-1] if stream and answer.status_code == 200 else answer.json()
        if "error" in last:
            assert last["error"]["code"] in HONEST, answer.text
            assert answer.status_code in {200, 500} or answer.headers["retry-after"]
            self.outcomes[last["error"]["code"]] += 1
        else:
            assert last["text"] == segments_text(segments)
            self.outcomes["whole"] += 1

    async def devil(self) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(self.chance.uniform(0.1, 1.5))
            match self.chance.choice(["kill", "kill", "kill", "force", "unload", "load"]):
                case "kill":
                    pid = (await self.client.get("/api/ps")).json()["worker"]["pid"]
                    with contextlib.suppress(ProcessLookupError, TypeError):
                        os.kill(pid, self.chance.choice([signal.SIGKILL, signal.SIGTERM]))
                case "force":
                    await self.client.delete("/api/ps/whisper-1", params={"force": "1"})
                case "unload":
                    await self.client.delete("/api/ps/whisper-1")
                case "load":
                    await self.client.post("/api/ps/whisper-1")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nobody_is_left_without_an_honest_answer(seed: int) -> None:
    with serving(worker=f"{FAKE} --segment-s 0.03", idle_seconds=0.3) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            storm = Storm(client, seed)
            await storm.run()
        print(seed, dict(storm.outcomes), "generations:", server.worker["generation"])
        assert storm.outcomes["whole"] >= 20
        server.until(lambda: running(server) + waiting(server) == 0, "no job left")
        server.until(lambda: server.worker["state"] == "stopped", "no lease left")
        assert server.worker["leases"] == 0
        assert not uploads(server.spool)
        assert server.ps()["spool_bytes"] == 0
        assert "unexpected_error" not in server.log()
