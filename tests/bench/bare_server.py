"""The least that a gateway can do with live frames: receive them and send each on over ZeroMQ. What it costs on a machine is
what our own cost there is compared with.

    python -m tests.bench.bare_server PORT

A process of its own reads what is sent. A text message ends a connection; the answer names the audio received, in seconds, as
our native dialect does.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq
from granian.constants import Interfaces
from granian.server.embed import Server

SINK = """
import sys, zmq
from worker.guard import die_with
die_with(int(sys.argv[2]))
socket = zmq.Context().socket(zmq.PULL)
socket.connect(sys.argv[1])
while True:
    socket.recv()
"""


class Bare:
    """An ASGI application."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        received = 0
        while (data := (await receive()).get("bytes")) is not None:
            received += len(data)
            self._socket.send(data, zmq.NOBLOCK)
        text = json.dumps({"type": "done", "duration": received / 2 / 16_000})
        await send({"type": "websocket.send", "text": text})
        await send({"type": "websocket.close", "code": 1000})


async def main(port: int) -> None:
    with TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'sink'}"
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.bind(address)
        sink = subprocess.Popen([sys.executable, "-c", SINK, address, str(os.getpid())])
        try:
            server = Server(Bare(socket), port=port, interface=Interfaces.ASGINL, log_enabled=False, backlog=1024)
            await server.serve()
        finally:
            sink.kill()
            sink.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
