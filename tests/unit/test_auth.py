"""Keys: who gets in, on which paths, and that no key shows anywhere."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.answers.errors_http import ErrorBoundary
from gateway.auth import Guard, KeyRing, credentials_from_headers
from tests.serving import serving

KEYS = ("sk-first", "sk-zwölf-ключ", "sk-third")


def test_every_key_opens_and_nothing_else() -> None:
    ring = KeyRing(KEYS)
    assert all(ring.check(key) for key in KEYS)
    assert not any(ring.check(key) for key in ("", "sk-firs", "sk-firstx", "SK-FIRST", "sk-zwo\u0308lf-ключ", "\udcff"))


def test_without_keys_everybody_may_enter() -> None:
    assert KeyRing([]).open and KeyRing([""]).open
    assert KeyRing([]).check("anything")
    assert not KeyRing(KEYS).open


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    genuine = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for presented in (*KEYS, "wrong", "x" * 1000):
        compared.clear()
        KeyRing(KEYS).check(presented)
        assert compared == [(32, 32)] * 3


def test_a_key_ring_does_not_show_its_keys() -> None:
    ring = KeyRing(KEYS)
    assert "sk-" not in repr(ring) and "sk-" not in repr(vars(ring))


def scope(*headers: tuple[bytes, bytes], kind: str = "http", subprotocols: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": kind, "headers": list(headers), "subprotocols": list(subprotocols)}


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b"Bearer sk-1", "sk-1"),
        (b"bearer   sk-1 ", "sk-1"),
        (b"Token sk-1", "sk-1"),
        ("Bearer sk-zwölf".encode(), "sk-zwölf"),
        ("Bearer sk-zwölf".encode("latin-1"), "sk-zwölf"),
        (b"Basic dTpw", None),
        (b"Bearer", None),
        (b"Bearer ", None),
        (b"sk-1", None),
    ],
)
def test_the_authorization_header(header: bytes, key: str | None) -> None:
    assert credentials_from_headers(scope((b"authorization", header))) == key
    assert credentials_from_headers(scope((b"Authorization", header), kind="websocket")) == key


@pytest.mark.parametrize(
    ("subprotocols", "key"),
    [
        (("realtime", "openai-insecure-api-key.sk-1", "openai-beta.realtime-v1"), "sk-1"),
        (("token", "sk-1"), "sk-1"),
        (("bearer", "sk-1"), "sk-1"),
        (("realtime",), None),
        (("token",), None),
    ],
)
def test_what_a_browser_can_send(subprotocols: tuple[str, ...], key: str | None) -> None:
    assert credentials_from_headers(scope(kind="websocket", subprotocols=subprotocols)) == key
    assert credentials_from_headers(scope(kind="http", subprotocols=subprotocols)) is None


# ---------------------------------------------------------------- at the door


def app(keys: KeyRing) -> Starlette:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("in")

    paths = ("/health", "/v1/models", "/v1/audio/transcriptions")
    return Starlette(
        routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths],
        middleware=[Middleware(ErrorBoundary), Middleware(Guard, keys=keys)],
    )


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(KEYS)


async def test_doors_are_closed_without_a_key(ring: KeyRing) -> None:
    async with serving(app(ring)) as url, httpx.AsyncClient(base_url=url) as client:
        replies = {
            path: await client.get(path) for path in ("/health", "/v1/models", "/health/", "//health", "/nothing")
        }
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer sk-wrong"})
        right = [
            await client.get("/v1/models", headers={b"authorization": f"{scheme} {key}".encode()})
            for scheme in ("Bearer", "Token")
            for key in KEYS
        ]
    assert {path: reply.status_code for path, reply in replies.items()} == {
        "/health": 200,
        "/v1/models": 401,
        "/health/": 401,
        "//health": 401,
        "/nothing": 401,
    }
    assert [reply.status_code for reply in right] == [200] * 6
    assert wrong.headers["www-authenticate"].startswith("Bearer")
    error = wrong.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "sk-wrong" not in wrong.text


async def test_an_open_server_asks_for_nothing() -> None:
    async with serving(app(KeyRing([]))) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models")).text == "in"


async def test_the_sdk_says_authentication_error(ring: KeyRing) -> None:
    async with serving(app(ring)) as url, openai.AsyncOpenAI(api_key="sk-wrong", base_url=f"{url}/v1") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", bytes(3_000_000)))
    assert caught.value.code == "invalid_api_key"


async def test_a_refused_upload_is_answered_and_not_reset(ring: KeyRing) -> None:
    async with serving(app(ring)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        for _ in range(80):
            writer.write(bytes(100_000))
            await writer.drain()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()
