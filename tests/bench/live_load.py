"""The gateway under 200 calls: CPU time per frame of 20 ms, and every byte counted at the other end.

The worker is ``tests/fakes/worker.py``, so the figure is the gateway's alone: WebSocket, dialect, replay buffer, channel.
Clients are bare sockets with ready-made frames, so that they do not take the cores that are measured.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from tests.bench.figures import Figure
from tests.server import free_port, serving

STREAMS = 200
FRAMES_PER_SECOND = 50
SECONDS = 60.0
BARE_SECONDS = 20.0
FRAME_BYTES = 640
"""20 ms of s16le at 16 kHz."""
MUST_US, AIM_US = 80.0, 40.0


def measure() -> Iterator[Figure]:
    bare = asyncio.run(_bare())
    fake = f"{sys.executable} -P -m tests.fakes.worker"
    with serving(script=True, worker=fake) as server:
        gateway = _on_one_core(server.pid)
        result = asyncio.run(_load(server.port, gateway, SECONDS))
    lost = result.sent_samples - result.heard_samples
    cpu_us = result.cpu_seconds / result.frames * 1e6
    what = f"gateway CPU per live frame, {STREAMS} streams × {FRAMES_PER_SECOND}/s × {SECONDS:.0f} s"
    least = bare.cpu_seconds / bare.frames * 1e6
    note = f"{cpu_us / least:.2f} times what receiving them and sending each on costs on this machine, {least:.1f} µs"
    yield Figure(what, cpu_us, "µs", must=MUST_US, aim=AIM_US, note=note)
    yield Figure("samples lost on the way", float(lost), "", must=0.0)
    yield Figure("frames sent late by more than 100 ms", 100 * result.late / result.frames, "%")


@dataclass
class _Result:
    frames: int = 0
    late: int = 0
    sent_samples: int = 0
    heard_samples: int = 0
    cpu_seconds: float = 0.0


async def _bare() -> _Result:
    """The same frames through ``bare_server``."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.bare_server", str(port))
    try:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        return await _load(port, _on_one_core(process.pid), BARE_SECONDS)
    finally:
        process.terminate()
        await process.wait()


def _on_one_core(pid: int) -> psutil.Process:
    process = psutil.Process(pid)
    process.cpu_affinity([sorted(os.sched_getaffinity(0))[0]])
    return process


async def _load(port: int, gateway: psutil.Process, seconds: float) -> _Result:
    result = _Result()
    calls = [await _open(port) for _ in range(STREAMS)]
    frame = _frame(0x2, bytes(FRAME_BYTES))
    before = gateway.cpu_times()
    loop = asyncio.get_running_loop()
    began = loop.time()
    ticks = int(seconds * FRAMES_PER_SECOND)
    gap = 1 / FRAMES_PER_SECOND
    # Streams are spread over the 20 ms between two frames, as independent callers are.
    for tick in range(ticks):
        for number, (_, writer) in enumerate(calls):
            if number % 20 == 0:
                due = began + tick * gap + number / STREAMS * gap
                await asyncio.sleep(max(0.0, due - loop.time()))
                result.late += 20 * (loop.time() - due > 0.1)
            writer.write(frame)
    result.frames = ticks * STREAMS
    result.sent_samples = result.frames * FRAME_BYTES // 2
    for _, writer in calls:
        writer.write(_frame(0x1, b'{"type":"close"}'))
    ends = await asyncio.gather(*(_last_sample(reader) for reader, _ in calls))
    after = gateway.cpu_times()
    result.cpu_seconds = after.user + after.system - before.user - before.system
    result.heard_samples = sum(ends)
    for _, writer in calls:
        writer.close()
    return result


async def _open(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A native stream on a bare socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    writer.write(
        f"GET /v1/stream?sample_rate=16000 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head.splitlines()[0], head
    return reader, writer


def _frame(opcode: int, payload: bytes) -> bytes:
    """A client's frame, masked with zeros: legal, and the same bytes every time."""
    length = (
        bytes([0x80 | len(payload)]) if len(payload) < 126 else bytes([0x80 | 126]) + struct.pack(">H", len(payload))
    )
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


async def _last_sample(reader: asyncio.StreamReader) -> int:
    """Length of the stream as the worker counted it, from the last message before the close."""
    async with asyncio.timeout(60):
        while True:
            head = await reader.readexactly(2)
            length = head[1] & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", await reader.readexactly(2))
            payload = await reader.readexactly(length)
            if head[0] & 0x0F == 0x8:
                raise AssertionError(f"closed without its length: {payload!r}")
            if head[0] & 0x0F == 0x1:
                message = json.loads(payload)
                if message["type"] == "done":
                    samples: int = round(message["duration"] * 16_000)
                    return samples
