"""The body of a request, and what becomes of the rest of it when the request is refused in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Message, Receive

from shared import errors

STALL_S = 60.0
"""Seconds without a byte after which an upload is given up: it holds room in the spool."""

DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_S = 5.0
"""Bounds on what is read and dropped after a refusal."""


class Body:
    """The body as ASGI delivers it, and how far it has been read."""

    def __init__(self, receive: Receive, headers: Mapping[str, str], *, stall_s: float = STALL_S) -> None:
        self._receive = receive
        self._stall_s = stall_s
        self._uninvited = headers.get("expect", "").lower() == "100-continue"
        self.finished = "content-length" not in headers and "transfer-encoding" not in headers
        """Nothing follows: there is no body, its last message was read, or the client is gone."""

    async def receive(self) -> Message:
        """The next message of ASGI, as it is."""
        self._uninvited = False
        message = await self._receive()
        self.finished = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def read(self) -> bytes | None:
        """The next piece, None at the end. Raises Cancelled if the client leaves, BadRequest if it is still too long."""
        if self.finished:
            return None
        try:
            async with asyncio.timeout(self._stall_s):
                message = await self.receive()
        except TimeoutError:
            self.finished = True
            raise errors.BadRequest(f"The upload stalled for {self._stall_s:g} s.") from None
        if message["type"] != "http.request":
            raise errors.Cancelled("The client left during its upload.")
        chunk: bytes = message.get("body", b"")
        return chunk

    async def drain(self) -> None:
        """Read and drop what is left, within ``DRAIN_BYTES`` and ``DRAIN_S``.

        A client that sends its whole body before it listens would find its connection reset otherwise, and not the
        answer. One that asked whether it may send (``Expect: 100-continue``) and has not begun is left alone: to read
        would be to invite it.
        """
        if self._uninvited:
            return
        left = DRAIN_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while left > 0 and not self.finished:
                    left -= len((await self.receive()).get("body", b""))
