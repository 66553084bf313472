"""API keys: who may use a door. Without keys every door is open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.answers.errors_http import response
from shared.errors import Unauthorized

OPEN_PATHS = frozenset({"/health"})
"""Paths that answer without a key: a load balancer has none."""

_SCHEMES = frozenset({"bearer", "token"})
_SUBPROTOCOL_PREFIX = "openai-insecure-api-key."


class KeyRing:
    """The keys of ``NAPSCRIBE_API_KEYS``. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys if key)

    @property
    def open(self) -> bool:
        """There are no keys: everybody may enter."""
        return not self._digests

    def check(self, presented: str) -> bool:
        """Whether ``presented`` is one of the keys; always True when there are none.

        Takes the same time whichever key it is, and however much of one was guessed: digests of equal length are
        compared in constant time, all of them each time.
        """
        digest = _digest(presented)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return self.open or any(matches)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"


class Guard:
    """ASGI middleware: HTTP requests need a key, ``open_paths`` apart.

    WebSocket doors have ways of their own to bring a key and ask ``KeyRing.check`` themselves.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys.open or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        presented = credentials_from_headers(scope)
        if presented is None:
            return Unauthorized("No API key was sent.", hint="Send it as 'Authorization: Bearer KEY'.")
        if not self._keys.check(presented):
            return Unauthorized("The API key is wrong.", hint="It must be one of NAPSCRIBE_API_KEYS.")
        return None


def credentials_from_headers(scope: Scope) -> str | None:
    """The key that a request or a WebSocket handshake brings; None if it brings none.

    ``Authorization: Bearer KEY`` or ``Token KEY``; on a WebSocket also what browsers can send, the subprotocols
    ``openai-insecure-api-key.KEY`` and ``token, KEY``.
    """
    return next(_credentials(scope), None)


def _credentials(scope: Scope) -> Iterator[str]:
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            scheme, _, key = _text(value).strip().partition(" ")
            if scheme.lower() in _SCHEMES and key.strip():
                yield key.strip()
    if scope["type"] == "websocket":
        yield from _subprotocol_keys(list(scope.get("subprotocols", ())))


def _subprotocol_keys(subprotocols: list[str]) -> Iterator[str]:
    for index, name in enumerate(subprotocols):
        if name.startswith(_SUBPROTOCOL_PREFIX):
            yield name.removeprefix(_SUBPROTOCOL_PREFIX)
        elif name.lower() in _SCHEMES and index + 1 < len(subprotocols):
            yield subprotocols[index + 1]


def _text(value: bytes) -> str:
    """A header: UTF-8 where it is, else latin-1, so that a key beyond ASCII matches however the client encodes it."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
