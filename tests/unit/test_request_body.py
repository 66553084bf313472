"""Reading a body, and dropping the rest of one, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Receive

from gateway import request_body
from gateway.request_body import Body
from shared import errors

CHUNKED = {"transfer-encoding": "chunked"}


def sending(*messages: dict[str, Any]) -> Receive:
    """A client that sends these and then keeps its connection, as a server shows it."""
    rest: Iterable[dict[str, Any]] = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in rest:
            return message
        return await asyncio.Future[dict[str, Any]]()

    return receive


def piece(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_pieces_and_then_the_end() -> None:
    body = Body(sending(piece(b"one"), piece(b"two", more=False)), CHUNKED)
    assert [await body.read() for _ in range(4)] == [b"one", b"two", None, None]


async def test_a_request_without_a_body_is_not_waited_for() -> None:
    body = Body(sending(), {})
    assert await body.read() is None
    await asyncio.wait_for(body.drain(), 1)


async def test_a_client_that_leaves() -> None:
    body = Body(sending(piece(b"one"), {"type": "http.disconnect"}), CHUNKED)
    assert await body.read() == b"one"
    with pytest.raises(errors.Cancelled):
        await body.read()
    assert body.finished


async def test_a_silent_client_is_given_up() -> None:
    body = Body(sending(), CHUNKED, stall_s=0.01)
    with pytest.raises(errors.BadRequest, match="stalled"):
        await body.read()
    await asyncio.wait_for(body.drain(), 1)


async def test_draining_ends_with_the_body_or_with_the_client() -> None:
    for last in (piece(b"end", more=False), {"type": "http.disconnect"}):
        body = Body(sending(piece(b"one"), last), CHUNKED)
        await asyncio.wait_for(body.drain(), 1)
        assert body.finished


async def test_draining_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "DRAIN_BYTES", 1000)
    monkeypatch.setattr(request_body, "DRAIN_S", 0.01)
    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += 100
        return piece(bytes(100))

    for receive in (endless, sending()):
        await asyncio.wait_for(Body(receive, CHUNKED).drain(), 10)
    assert read == 1000


async def test_who_waits_for_an_invitation_is_not_drained() -> None:
    asking = {"content-length": "10", "expect": "100-Continue"}
    await asyncio.wait_for(Body(sending(), asking).drain(), 1)
