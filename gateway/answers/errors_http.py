"""Every failure of an HTTP door as OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.request_body import Body
from shared import errors, journal

DEFAULT_RETRY_AFTER_S = 2.0
"""Seconds for an error that can be retried and does not say when."""

_BY_STATUS: dict[int, type[errors.NapscribeError]] = {
    401: errors.Unauthorized,
    404: errors.NotFound,
    405: errors.MethodNotAllowed,
    413: errors.UploadTooLarge,
}

_encoder = msgspec.json.Encoder()


def envelope(error: errors.NapscribeError) -> dict[str, Any]:
    """The body of an error; its hint is part of the message."""
    return {
        "error": {"message": str(error), "type": error_type(error), "param": error.param, "code": error.code},
    }


def error_type(error: errors.NapscribeError) -> str:
    """OpenAI's kinds: what the caller can mend, what he must wait for, what is our fault."""
    if error.http_status == 429:
        return "rate_limit_error"
    if error.http_status < 500 or isinstance(error, errors.BadRequest):
        return "invalid_request_error"
    return "server_error"


def headers_of(error: errors.NapscribeError) -> dict[str, str]:
    """``Retry-After`` in whole seconds where a retry makes sense; ``x-should-retry`` for the SDKs.

    The SDKs repeat every answer of 409 and from 500 on, upload and all, unless they are told not to.
    """
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        wait = DEFAULT_RETRY_AFTER_S if error.retry_after is None else error.retry_after
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="napscribe"'
    if isinstance(error, errors.UpgradeRequired):
        headers["upgrade"] = "websocket"
    return headers


def response(
    error: errors.NapscribeError, headers: Mapping[str, str] | None = None, *, status: int | None = None
) -> Response:
    """The whole answer to a request that failed; ``status`` where it is another than the error's own."""
    return Response(
        _encoder.encode(envelope(error)),
        status_code=status or error.http_status,
        headers={**headers_of(error), **(headers or {})},
        media_type="application/json",
    )


async def on_napscribe_error(request: Request, error: Exception) -> Response:
    """For starlette: an error of our tree."""
    assert isinstance(error, errors.NapscribeError)
    return response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """For starlette: what its router raises (404, 405), and anything else with a status."""
    assert isinstance(error, HTTPException)
    return response(_typed(request, error), error.headers, status=error.status_code)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """For starlette: the caller left; nobody reads this."""
    return response(errors.Cancelled("The caller left."))


HANDLERS: dict[Any, Any] = {
    errors.NapscribeError: on_napscribe_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_disconnect,
}
"""For ``Starlette(exception_handlers=…)``. What is in none of them is for ``ErrorBoundary``."""


class ErrorBoundary:
    """ASGI middleware around every door: no request ends in a bare traceback, none in a connection reset.

    An error nobody expected becomes a 500 that tells nothing but its code; errors of our tree that other middlewares
    raise are answered, too. Before an answer that refuses the request, the unread rest of its body is dropped, within
    bounds. After the first byte of an answer there is nothing left to say: the error goes up, so that the server cuts
    the connection instead of ending the answer as if it were whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(receive, Headers(scope=scope))
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                if message["status"] >= 400:
                    await body.drain()
                started = True
            await send(message)

        try:
            await self._app(scope, body.receive, watched)
        except Exception as error:
            answer = error if isinstance(error, errors.NapscribeError) else unexpected(error, scope["path"])
            if started:
                raise
            await response(answer)(scope, body.receive, watched)


def unexpected(error: BaseException, where: str) -> errors.NapscribeError:
    """Log an error nobody expected and return what the caller may know of it.

    Its message stays out of the log: it may hold what was said, or a key. Kind and place are enough to find it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    trail = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
    journal.log("unexpected_error", level="error", path=where, error=type(error).__qualname__, trail=trail)
    return errors.NapscribeError(
        "Something went wrong in the server.", hint="Its log has an unexpected_error that says where."
    )


def _typed(request: Request, error: HTTPException) -> errors.NapscribeError:
    method, path = request.method, request.url.path
    match error.status_code:
        case 404:
            return errors.NotFound(f"There is nothing at {method} {path}.")
        case 405:
            return errors.MethodNotAllowed(f"{path} does not take {method}.")
        case status:
            kind = _BY_STATUS.get(status, errors.BadRequest if status < 500 else errors.NapscribeError)
            return kind(error.detail)
