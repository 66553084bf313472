"""Failures as HTTP clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.answers.errors_http import HANDLERS, ErrorBoundary, envelope, response
from shared import errors
from tests.serving import serving

SECRET = "what the caller said"


def asking(failure: BaseException) -> Starlette:
    """A door that fails this way."""

    async def door(request: Request) -> Response:
        raise failure

    async def broken() -> AsyncIterator[bytes]:
        yield b"the first half"
        raise RuntimeError(SECRET)

    async def stream(request: Request) -> Response:
        return StreamingResponse(broken())

    async def upload(request: Request) -> Response:
        raise errors.Unsupported("Not here.")

    async def fine(request: Request) -> Response:
        return PlainTextResponse("fine")

    return Starlette(
        routes=[
            Route("/v1/models", door),
            Route("/stream", stream),
            Route("/fine", fine),
            Route("/upload", upload, methods=["POST"]),
            Route("/broken", door, methods=["POST"]),
        ],
        middleware=[Middleware(ErrorBoundary)],
        exception_handlers=HANDLERS,
    )


async def get(failure: BaseException, path: str = "/v1/models", method: str = "GET") -> httpx.Response:
    async with serving(asking(failure)) as url, httpx.AsyncClient(base_url=url) as client:
        return await client.request(method, path)


@pytest.mark.parametrize("kind", errors.BY_CODE.values(), ids=errors.BY_CODE.keys())
def test_every_error_has_its_envelope(kind: type[errors.NapscribeError]) -> None:
    answer = response(kind("It failed.", hint="Try this.", param="file"))
    body = json.loads(bytes(answer.body))["error"]
    assert answer.status_code == kind.http_status
    assert body.keys() == {"message", "type", "param", "code"}
    assert (body["message"], body["param"], body["code"]) == ("It failed. Try this.", "file", kind.code)
    assert body["type"] == ("rate_limit_error" if kind is errors.QueueFull else body["type"])
    assert ("retry-after" in answer.headers) is kind.retryable
    assert answer.headers["x-should-retry"] == str(kind.retryable).lower()


def test_the_type_says_whose_fault_it_is() -> None:
    def kind(error: errors.NapscribeError) -> str:
        return str(envelope(error)["error"]["type"])

    assert kind(errors.BadRequest("")) == kind(errors.ModelNotFound("")) == "invalid_request_error"
    assert kind(errors.Unsupported("")) == "invalid_request_error"
    assert kind(errors.QueueFull("")) == "rate_limit_error"
    assert kind(errors.SpoolFull("")) == kind(errors.EngineFailed("")) == "server_error"


@pytest.mark.parametrize(("wait", "header"), [(0.0, "1"), (0.2, "1"), (5.0, "5"), (5.1, "6"), (None, "2")])
def test_retry_after_is_whole_seconds(wait: float | None, header: str) -> None:
    assert response(errors.SpoolFull("full", retry_after=wait)).headers["retry-after"] == header


async def test_the_router_speaks_the_same() -> None:
    missing = await get(RuntimeError(), "/v1/nothing")
    method = await get(RuntimeError(), "/fine", "DELETE")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "/v1/nothing" in missing.json()["error"]["message"]
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in method.headers["allow"]


async def test_any_other_status_keeps_its_number() -> None:
    reply = await get(HTTPException(418, "teapot"))
    assert (reply.status_code, reply.json()["error"]["message"]) == (418, "teapot")
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_an_unexpected_error_tells_nothing_and_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    reply = await get(ValueError(SECRET))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert SECRET not in reply.text
    logged = capsys.readouterr().err
    line: dict[str, Any] = json.loads(logged.splitlines()[-1])
    assert (line["event"], line["error"], line["path"]) == ("unexpected_error", "ValueError", "/v1/models")
    assert "test_errors_http.py" in line["trail"][-1] and "door" in line["trail"][-1]
    assert SECRET not in logged


async def test_a_caller_that_left_is_no_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert (await get(ClientDisconnect())).status_code == 499
    assert capsys.readouterr().err == ""


async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await get(RuntimeError(), "/stream")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/fine", 405), ("/upload", 501), ("/broken", 500)])
async def test_an_upload_nobody_reads_is_answered_and_not_reset(path: str, status: int) -> None:
    async with serving(asking(RuntimeError(SECRET))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n" % path.encode())
        for _ in range(80):
            writer.write(bytes(100_000))
            await writer.drain()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d" % status)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (errors.BadRequest("x"), openai.BadRequestError),
        (errors.ModelNotFound("x"), openai.NotFoundError),
        (errors.Conflict("x"), openai.ConflictError),
        (errors.Unsupported("x"), openai.InternalServerError),
        (errors.WorkerCrashed("x"), openai.InternalServerError),
    ],
)
async def test_the_sdk_raises_its_own_and_does_not_repeat_in_vain(
    failure: errors.NapscribeError, raised: type[openai.APIStatusError]
) -> None:
    asked = 0

    async def door(request: Request) -> Response:
        nonlocal asked
        asked += 1
        raise failure

    app = Starlette(routes=[Route("/v1/models", door)], exception_handlers=HANDLERS)
    async with serving(app) as url, openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=2) as client:
        with pytest.raises(raised) as caught:
            await client.models.list()
    assert caught.value.code == failure.code
    assert asked == 1


async def test_the_sdk_comes_back_when_asked_to() -> None:
    asked = 0

    async def door(request: Request) -> Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise errors.QueueFull("full", retry_after=0.1)
        return Response(b'{"object":"list","data":[]}', media_type="application/json")

    app = Starlette(routes=[Route("/v1/models", door)], exception_handlers=HANDLERS)
    async with serving(app) as url, openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1") as client:
        assert (await client.models.list()).data == []
    assert asked == 2


def test_a_failure_of_the_engine_always_says_what_to_do() -> None:
    assert errors.EngineFailed("It failed.").hint
    assert errors.EngineFailed("It failed.", hint="Install it.").hint == "Install it."
    assert errors.from_code("engine_failed", "It failed.").hint
