"""The WebSocket routes. A door checks the key and the model at the handshake, builds its dialect and lets it run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from gateway.auth import KeyRing, credentials_from_headers
from gateway.context import new_request_id
from gateway.model import ServedModel
from gateway.streams import deepgram, native, openai_realtime, twilio_signature
from gateway.streams.calls import Calls
from gateway.streams.client_secrets import ClientSecrets
from gateway.streams.dialect import Dialect
from gateway.streams.hub import Hub
from gateway.streams.runner import Runner, refuse
from gateway.streams.twilio import Twilio
from shared.errors import NapscribeError, NotFound, Unauthorized, UpgradeRequired

Build = Callable[[WebSocket], Dialect]
"""Reads the handshake. Raises NapscribeError for what the door does not take."""


class _Door:
    """A door as an ASGI application, so that it gets the server's ``receive`` beside starlette's view of the connection."""

    def __init__(self, serve: Callable[[WebSocket, Receive], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(WebSocket(scope, receive, send), receive)


class Doors:
    """All live doors of a gateway: one small method each."""

    def __init__(self, hub: Hub, keys: KeyRing, model: ServedModel, calls: Calls, twilio_auth_token: str = "") -> None:
        self._hub = hub
        self._keys = keys
        self._model = model
        self._calls = calls
        self._twilio_auth_token = twilio_auth_token
        self._secrets = ClientSecrets(model.id, spoken=lambda: hub.languages)

    def routes(self) -> list[BaseRoute]:
        live = {
            "/v1/stream": self.native,
            "/ws/transcribe": self.native,
            "/v1/listen": self.deepgram,
            "/v1/realtime": self.openai_realtime,
            "/realtime": self.openai_realtime,
            "/twilio": self.twilio,
        }
        return [
            *(WebSocketRoute(path, _Door(door)) for path, door in live.items()),
            *(Route(path, self.plain) for path in live),
            *self._secrets.routes(),
            *self._calls.routes(),
            WebSocketRoute("/{path:path}", self.nowhere),
        ]

    async def plain(self, request: Request) -> Response:
        """A live door without the upgrade: a proxy that does not pass it on, or a browser's address line."""
        raise UpgradeRequired(
            f"{request.url.path} is a live door: it speaks WebSocket.",
            hint="Behind a proxy, let it pass the headers Upgrade and Connection. Files go to POST /v1/audio/transcriptions.",
        )

    async def nowhere(self, websocket: WebSocket) -> None:
        await refuse(
            websocket,
            NotFound(
                f"There is no live door at {websocket.url.path}.",
                hint="There are /v1/stream, /v1/realtime, /v1/listen and /twilio.",
            ),
        )

    async def native(self, websocket: WebSocket, receive: Receive) -> None:
        await self._serve(websocket, receive, self._native)

    def _native(self, websocket: WebSocket) -> Dialect:
        self._admit(websocket)
        return native.dialect(websocket.query_params, websocket.scope.get("subprotocols", ()), self._model.id)

    async def deepgram(self, websocket: WebSocket, receive: Receive) -> None:
        await self._serve(websocket, receive, self._deepgram)

    def _deepgram(self, websocket: WebSocket) -> Dialect:
        self._admit(websocket)
        return deepgram.dialect(
            websocket.query_params,
            websocket.scope.get("subprotocols", ()),
            self._model.id,
            new_request_id(),
            datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    async def openai_realtime(self, websocket: WebSocket, receive: Receive) -> None:
        await self._serve(websocket, receive, self._openai_realtime)

    def _openai_realtime(self, websocket: WebSocket) -> Dialect:
        """A client secret brings its session along."""
        prepared = self._secrets.session(credentials_from_headers(websocket.scope) or "")
        if prepared is None:
            self._admit(websocket)
        offered = websocket.scope.get("subprotocols", ())
        return openai_realtime.dialect(
            websocket.query_params, websocket.headers, offered, self._model.id, prepared, self._hub.languages
        )

    async def twilio(self, websocket: WebSocket, receive: Receive) -> None:
        try:
            dialect = self._twilio(websocket)
        except NapscribeError as error:
            await refuse(websocket, error)
            return
        try:
            await Runner(websocket, receive, dialect, self._hub).run()
        finally:
            dialect.close()

    def _twilio(self, websocket: WebSocket) -> Twilio:
        """By signature, by key in a header, or later by the parameter ``token``. Raises Unauthorized."""
        signed = twilio_signature.HEADER in websocket.headers
        if self._twilio_auth_token and (signed or self._keys.open):
            url = websocket.url
            target = f"{url.path}?{url.query}" if url.query else url.path
            if not twilio_signature.is_signed(self._twilio_auth_token, websocket.headers, target):
                raise Unauthorized(
                    "The signature of Twilio is missing or wrong.", hint="See NAPSCRIBE_TWILIO_AUTH_TOKEN."
                )
            return Twilio(self._calls, None)
        if not self._keys.open and credentials_from_headers(websocket.scope) is None:
            return Twilio(self._calls, self._keys.check)
        self._admit(websocket)
        return Twilio(self._calls, None)

    def _admit(self, websocket: WebSocket) -> None:
        """A key in a header or a subprotocol. Raises Unauthorized."""
        if self._keys.open:
            return
        presented = credentials_from_headers(websocket.scope)
        if presented is None:
            raise Unauthorized(
                "No API key was sent.",
                hint="Send 'Authorization: Bearer KEY', or the subprotocol 'openai-insecure-api-key.KEY'.",
            )
        if not self._keys.check(presented):
            raise Unauthorized("The API key is wrong.", hint="It must be one of NAPSCRIBE_API_KEYS.")

    async def _serve(self, websocket: WebSocket, receive: Receive, build: Build) -> None:
        try:
            dialect = build(websocket)
        except NapscribeError as error:
            await refuse(websocket, error)
            return
        await Runner(websocket, receive, dialect, self._hub).run()
