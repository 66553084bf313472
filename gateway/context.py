"""What every answer carries: ``x-request-id`` and ``server-timing``. A pure ASGI layer, outermost but for errors."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """Request id (the caller's, where it is sane) and the stages' timings, reachable as ``scope["state"]``."""

    def __init__(self, app: ASGIApp, seen: Callable[[], None]) -> None:
        """``seen`` is called once for each request."""
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._seen()
        began = time.perf_counter()
        request_id = request_id_of(scope)
        timings: dict[str, float] = {}
        scope.setdefault("state", {}).update(request_id=request_id, timings=timings)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                stages = {**timings, "total": (time.perf_counter() - began) * 1e3}
                headers["server-timing"] = ", ".join(f"{name};dur={ms:.1f}" for name, ms in stages.items())
            await send(message)

        await self._app(scope, receive, with_headers)


def request_id_of(scope: Scope) -> str:
    """The caller's id if it is short and plain, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return new_request_id()


def new_request_id() -> str:
    return "req_" + secrets.token_hex(12)
