"""The server that Napscribe embeds, in the event loop of a test, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.types import ASGIApp


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve ``app`` until the block ends; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(
        app, address="127.0.0.1", port=port, interface=Interfaces.ASGINL, websockets=False, log_enabled=False
    )
    serve = asyncio.ensure_future(server.serve())
    await _listening(port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()  # type: ignore[no-untyped-call]
        await serve


async def _listening(port: int) -> None:
    """Return once the port takes connections; the server says so in no other way. The test's timeout bounds it."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.005)
        else:
            writer.close()
            return await writer.wait_closed()
