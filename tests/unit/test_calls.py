"""Readers of a call's transcript, and its webhook, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from gateway.answers.errors_http import HANDLERS
from gateway.streams import call_webhook, calls
from gateway.streams.call_webhook import CallWebhook
from gateway.streams.calls import Call, Calls
from shared.errors import BadRequest, TooManyStreams
from tests.serving import serving

# ---------------------------------------------------------------- readers of a call


@contextlib.asynccontextmanager
async def reading(all_calls: Calls) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=all_calls.routes(), exception_handlers=HANDLERS)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


async def read(client: httpx.AsyncClient, sid: str, begun: asyncio.Event | None = None, last: str = "") -> list[Any]:
    """All events until the stream ends."""
    events: list[Any] = []
    async with client.stream("GET", f"/v1/calls/{sid}/events", headers={"last-event-id": last}) as answer:
        if answer.status_code != 200:
            return [answer.status_code]
        async for line in answer.aiter_lines():
            if begun is not None:
                begun.set()
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def say(call: Call, *texts: str) -> None:
    for text in texts:
        call.publish({"type": "final", "text": text})


def texts(events: list[Any]) -> list[str]:
    return [event["text"] for event in events if event["type"] == "final"]


async def test_readers_before_during_and_after_a_call_read_the_same() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        waiting = asyncio.Event()
        before = asyncio.ensure_future(read(client, "CA1", waiting))
        await waiting.wait()
        call = all_calls.join("CA1")
        say(call, "one")
        joined = asyncio.Event()
        during = asyncio.ensure_future(read(client, "CA1", joined))
        await joined.wait()
        call.mention({"type": "partial", "text": "tw"}, "partial")
        say(call, "two")
        call.leave()
        after = await read(client, "CA1")
        assert texts(await before) == texts(await during) == texts(after) == ["one", "two"]
        assert [event["type"] for event in await before] == ["final", "partial", "final"]
        assert [event["type"] for event in after] == ["final", "final"]
        assert {event["call_sid"] for event in after} == {"CA1"}


async def test_a_browser_goes_on_where_it_was_and_is_told_when_that_was_all() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        call = all_calls.join("CA1")
        say(call, "one", "two", "three")
        call.leave()
        assert texts(await read(client, "CA1", last="1")) == ["two", "three"]
        assert await read(client, "CA1", last="3") == [204]
        assert texts(await read(client, "CA1", last="x")) == ["one", "two", "three"]


async def test_calls_do_not_mix_and_sids_are_checked() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        first, second = all_calls.join("CA1"), all_calls.join("CA2")
        say(first, "one")
        say(second, "two")
        first.leave()
        second.leave()
        assert texts(await read(client, "CA2")) == ["two"]
        assert await read(client, "a" * 65) == [400]


async def test_a_second_stream_of_a_call_keeps_it_going() -> None:
    call = Calls().join("CA1")
    call.streams += 1
    call.leave()
    assert not call.over
    call.leave()
    assert call.over


async def test_a_finished_call_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEEP_SECONDS", 0.0)
    all_calls = Calls()
    call = all_calls.join("CA1")
    say(call, "one")
    call.leave()
    while "CA1" in all_calls._calls:
        await asyncio.sleep(0)
    assert all_calls.join("CA1") is not call


async def test_calls_readers_and_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 3)
    monkeypatch.setattr(calls, "MAX_HISTORY_BYTES", 1_000)
    all_calls = Calls()
    old = all_calls.join("CA0")
    say(old, *(f"{number:0100}" for number in range(50)))
    assert 3 <= len(old._history) <= 8
    assert texts([json.loads(data.split(b"data: ")[1]) for _, data in old.read_after(0).frames])[-1] == f"{49:0100}"
    all_calls.join("CA1")
    all_calls.join("CA2")
    with pytest.raises(TooManyStreams):
        all_calls.join("CA3")
    old.leave()
    all_calls.join("CA3")
    assert list(all_calls._calls) == ["CA1", "CA2", "CA3"]
    with pytest.raises(BadRequest):
        all_calls.join("../etc")


async def test_a_reader_that_does_not_read_loses_what_is_of_the_moment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_UNREAD", 20)
    call = Calls().join("CA1")
    reader = call.read_after(0)
    for number in range(50):
        call.mention({"type": "partial", "text": str(number)}, "partial")
    assert len(reader.frames) == 1
    say(call, *map(str, range(19)))
    assert not reader.lost
    say(call, "too much")
    assert reader.lost


# ---------------------------------------------------------------- webhook


class Receiver:
    """A real HTTP server that answers with the statuses it is given, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.news = asyncio.Condition()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status = self.statuses.pop(0) if self.statuses else 204
        self.got.append(({k.decode(): v.decode() for k, v in scope["headers"]}, body))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        async with self.news:
            self.news.notify_all()

    async def until(self, count: int) -> list[Any]:
        """The first ``count`` bodies."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.got) >= count)
        return [json.loads(body) for _, body in self.got[:count]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "FIRST_PAUSE_SECONDS", 0.01)


async def test_events_arrive_in_order_and_a_failure_is_repeated() -> None:
    receiver = Receiver(500, 503, 429)
    async with serving(receiver) as url:
        webhook = CallWebhook(f"{url}/hook", "shared secret")
        for number in range(3):
            webhook.post({"type": "final", "call_sid": "CA1", "id": number, "text": f"№ {number}"})
        bodies = await receiver.until(6)
        assert [body["id"] for body in bodies] == [0, 0, 0, 0, 1, 2]
        headers, body = receiver.got[-1]
        assert (
            headers["x-napscribe-signature"] == "sha256=" + hmac.new(b"shared secret", body, hashlib.sha256).hexdigest()
        )
        assert headers["x-napscribe-delivery"] == "CA1:2"
        await webhook.aclose()
        assert webhook.dropped == 0


async def test_what_the_receiver_refuses_is_dropped_and_the_next_goes_on() -> None:
    receiver = Receiver(404, *[500] * call_webhook.ATTEMPTS)
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        for number in range(3):
            webhook.post({"type": "final", "id": number})
        bodies = await receiver.until(2 + call_webhook.ATTEMPTS)
        assert [body["id"] for body in bodies] == [0, *[1] * call_webhook.ATTEMPTS, 2]
        await webhook.aclose()
        assert webhook.dropped == 2


async def test_a_sender_that_cannot_be_made_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "MAX_PAUSE_SECONDS", 0.2)
    make, tries = call_webhook._client, []

    def fail() -> None:
        tries.append(time.monotonic())
        raise FileNotFoundError("certificates")

    monkeypatch.setattr(call_webhook, "_client", fail)
    async with serving(receiver := Receiver()) as url:
        webhook = CallWebhook(url)
        webhook.post({"type": "final", "id": 1})
        async with asyncio.timeout(20):
            while len(tries) < 3:
                await asyncio.sleep(0.01)
        assert all(after - before >= 0.19 for before, after in pairwise(tries))
        monkeypatch.setattr(call_webhook, "_client", make)
        assert [body["id"] for body in await receiver.until(1)] == [1]
        await webhook.aclose()
        assert webhook.dropped == 0


async def test_nobody_there_is_no_harm() -> None:
    webhook = CallWebhook("http://127.0.0.1:9/")
    webhook.post({"type": "final", "id": 1})
    assert webhook._sender is not None
    await asyncio.wait_for(asyncio.shield(_dropped(webhook)), 20)
    await webhook.aclose()


async def _dropped(webhook: CallWebhook) -> None:
    while not webhook.dropped:
        await asyncio.sleep(0.005)


async def test_a_sender_that_left_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "LINGER_SECONDS", 0.0)
    receiver = Receiver()
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        for number in range(3):
            webhook.post({"type": "final", "id": number})
            await receiver.until(number + 1)
            sender = webhook._sender
            assert sender is not None
            await sender
        await webhook.aclose()


class _SlowToClose(httpx.AsyncClient):
    """Closes when it is told to."""

    closing = asyncio.Event()
    may_close = asyncio.Event()

    async def aclose(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        await super().aclose()


async def test_an_event_that_comes_while_the_sender_leaves_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(call_webhook, "_client", _SlowToClose)
    receiver = Receiver()
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        webhook.post({"type": "final", "id": 1})
        await _SlowToClose.closing.wait()
        webhook.post({"type": "final", "id": 2})
        _SlowToClose.may_close.set()
        assert [body["id"] for body in await receiver.until(2)] == [1, 2]
        await webhook.aclose()


async def test_events_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "MAX_WAITING", 3)
    webhook = CallWebhook("http://127.0.0.1:9/")
    for number in range(5):
        webhook.post({"type": "final", "id": number})
    assert [event["id"] for _, event in webhook._waiting] == [2, 3, 4]
    assert webhook.dropped == 2
    monkeypatch.setattr(call_webhook, "CLOSE_SECONDS", 0.0)
    await webhook.aclose()
