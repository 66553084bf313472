"""Client secrets: a key for a browser that lasts minutes, made by a server that has a real one.

A secret is stateless: when it expires and how its sessions are set up, signed with a key that this process made for itself
and forgets when it ends. It opens the realtime WebSocket and nothing else.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.request_body import Body
from gateway.streams.openai_session import Session
from shared.errors import BadRequest, UploadTooLarge
from shared.languages import require_spoken

PREFIX = "ek_"
GA_SECONDS, BETA_SECONDS = 600, 60
"""Lifetime where nobody asks for another, as at OpenAI."""
MIN_SECONDS, MAX_SECONDS = 10, 7200
MAX_BODY_BYTES = 64 * 1024
MAX_SESSION_BYTES = 3 * 1024
"""Of a session inside a secret, which travels in a header; servers and proxies take 8 KiB of them."""

_encoder = msgspec.json.Encoder()


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    expires_at: int
    """Unix time, seconds."""
    session: Session


class ClientSecrets:
    """Makes secrets and knows them again."""

    def __init__(
        self, model: str, now: Callable[[], float] = time.time, spoken: Callable[[], Collection[str]] = tuple
    ) -> None:
        """``model``: id of the served model. ``now``: Unix time in seconds. ``spoken``: languages that the model knows, empty
        while nobody knows."""
        self._model = model
        self._now = now
        self._spoken = spoken
        self._key = secrets.token_bytes(32)

    def issue(self, session: Session, lifetime: int) -> tuple[str, int]:
        """A secret for sessions like this one and when it expires. Raises BadRequest for a session that is too long."""
        claims = _Claims(int(self._now()) + lifetime, session)
        body = msgspec.msgpack.encode(claims)
        if len(body) > MAX_SESSION_BYTES:
            raise BadRequest(
                "The session does not fit into a client secret.",
                hint=f"Prompt and keywords may have {MAX_SESSION_BYTES} bytes; send longer ones in a session.update.",
                param="session",
            )
        return f"{PREFIX}{_to_text(body)}.{_to_text(self._sign(body))}", claims.expires_at

    def session(self, presented: str) -> Session | None:
        """The session of a secret of ours that has not expired; None for anything else."""
        body, _, signature = presented.removeprefix(PREFIX).partition(".")
        if not presented.startswith(PREFIX) or not signature:
            return None
        try:
            raw, signed = _to_bytes(body), _to_bytes(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(signed, self._sign(raw)):
            return None
        claims = msgspec.msgpack.decode(raw, type=_Claims)
        return claims.session if self._now() < claims.expires_at else None

    def _sign(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).digest()

    # ------------------------------------------------------------ doors

    def routes(self) -> list[BaseRoute]:
        """Behind the guard of all HTTP doors: they ask for a real key."""
        return [
            Route("/v1/realtime/client_secrets", self.client_secrets, methods=["POST"]),
            Route("/v1/realtime/transcription_sessions", self.transcription_sessions, methods=["POST"]),
            Route("/v1/realtime/sessions", self.sessions, methods=["POST"]),
        ]

    async def client_secrets(self, request: Request) -> Response:
        """GA. Raises BadRequest, ModelNotFound, UploadTooLarge."""
        body = await _read(request)
        session = self._ordered(body.get("session"))
        value, expires_at = self.issue(session, _lifetime(body.get("expires_after"), "expires_after", GA_SECONDS))
        shown = session.shown(_session_id(), beta=False)
        return _answer({"value": value, "expires_at": expires_at, "session": {**shown, "expires_at": expires_at}})

    async def transcription_sessions(self, request: Request) -> Response:
        """Beta."""
        return _answer(await self._beta(request))

    async def sessions(self, request: Request) -> Response:
        """Beta, for clients that know only conversations."""
        shown = await self._beta(request)
        return _answer({**shown, "object": "realtime.session", "model": self._model})

    def _ordered(self, fields: Any) -> Session:
        session = Session(self._model).merged(fields)
        require_spoken(session.language, self._spoken(), param="session.audio.input.transcription.language")
        return session

    async def _beta(self, request: Request) -> dict[str, Any]:
        body = await _read(request)
        wish = body.get("client_secret")
        wish = wish if isinstance(wish, dict) else {}
        expiry = wish.get("expires_after", wish.get("expires_at"))  # two SDKs, two names
        lifetime = _lifetime(expiry, "client_secret.expires_after", BETA_SECONDS)
        session = self._ordered(body)
        value, expires_at = self.issue(session, lifetime)
        shown = session.shown(_session_id(), beta=True)
        return {**shown, "client_secret": {"value": value, "expires_at": expires_at}}


async def _read(request: Request) -> dict[str, Any]:
    """The JSON object of a request; nothing at all is an empty one."""
    body, data = Body(request.receive, request.headers), bytearray()
    while (chunk := await body.read()) is not None:
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise UploadTooLarge(f"The body has more than {MAX_BODY_BYTES} bytes.")
    try:
        parsed = msgspec.json.decode(data) if data.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("The body is not JSON.", hint='Send {"session": {"type": "transcription"}}.') from None
    if not isinstance(parsed, dict):
        raise BadRequest("The body is a JSON object.")
    return parsed


def _lifetime(value: Any, path: str, default: int) -> int:
    """Seconds, of ``{"anchor": "created_at", "seconds": 600}``."""
    if value is None:
        return default
    asked = value.get("seconds", default) if isinstance(value, dict) else None
    if not isinstance(asked, int) or not MIN_SECONDS <= asked <= MAX_SECONDS:
        raise BadRequest(
            f"{path}.seconds is a whole number from {MIN_SECONDS} to {MAX_SECONDS}.", param=f"{path}.seconds"
        )
    return asked


def _answer(body: dict[str, Any]) -> Response:
    return Response(_encoder.encode(body), media_type="application/json", headers={"cache-control": "no-store"})


def _session_id() -> str:
    return f"sess_{secrets.token_hex(12)}"


def _to_text(data: bytes) -> str:
    """base64url without padding: what a subprotocol may consist of."""
    return binascii.b2a_base64(data, newline=False).decode().rstrip("=").replace("+", "-").replace("/", "_")


def _to_bytes(text: str) -> bytes:
    """Raises ValueError."""
    padded = text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4)
    return binascii.a2b_base64(padded, strict_mode=True)
