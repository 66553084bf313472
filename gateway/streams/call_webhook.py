"""What is said in calls, as POSTs to a URL of the operator's: in order, repeated if they fail, never in a call's way.

One event at a time; a receiver that is down holds up the events behind it, until they are too old or too many.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import hmac
import time
from typing import TYPE_CHECKING, Any

import msgspec

from shared.journal import log

if TYPE_CHECKING:
    import httpx

MAX_WAITING = 10_000
"""Events; the oldest are dropped."""
MAX_AGE_SECONDS = 300.0
ATTEMPTS = 6
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0
"""Between two attempts: doubled each time."""
TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 5.0
"""Without an event, after which connection and client are given up."""
CLOSE_SECONDS = 3.0
"""When the server stops, what still waits may take so long."""
REPEATABLE = frozenset({408, 425, 429})
"""Besides everything from 500 on."""

_encode = msgspec.json.Encoder().encode


class CallWebhook:
    """Everything runs on the loop but for the import of httpx, which takes long and so runs in a thread."""

    def __init__(self, url: str, secret: str = "") -> None:
        """With ``secret``, every POST has ``x-napscribe-signature: sha256=`` and the HMAC of its body in hex."""
        self._url = url
        self._secret = secret.encode()
        self._waiting: collections.deque[tuple[float, dict[str, Any]]] = collections.deque(maxlen=MAX_WAITING)
        self._news = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._closing = False
        self.dropped = 0

    def post(self, event: dict[str, Any]) -> None:
        """Returns at once."""
        self.dropped += len(self._waiting) == MAX_WAITING
        self._waiting.append((time.monotonic(), event))
        self._news.set()
        self._send()

    async def aclose(self) -> None:
        """Deliver what waits, for a short while."""
        self._closing = True
        self._news.set()
        sender = self._sender
        if sender is None:
            return
        await asyncio.wait({sender}, timeout=CLOSE_SECONDS)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)

    # ------------------------------------------------------------ the sender

    def _send(self, _ended: object = None) -> None:
        """See to it that somebody sends, also if the last sender was just leaving."""
        idle = self._sender is None or self._sender.done()
        if idle and self._waiting and not self._closing:
            self._sender = asyncio.ensure_future(self._run())
            self._sender.add_done_callback(self._send)

    async def _run(self) -> None:
        try:
            client = await asyncio.to_thread(_client)
        except Exception as error:  # a proxy that httpx cannot speak to, certificates that are not there
            log("webhook cannot be sent", level="error", error=repr(error))
            self._drop_old()
            await asyncio.sleep(MAX_PAUSE_SECONDS)
            return
        try:
            while await self._has_event():
                came, event = self._waiting[0]
                if time.monotonic() - came > MAX_AGE_SECONDS or not await self._deliver(client, event):
                    self.dropped += 1
                    log("webhook event dropped", level="warning", call_sid=event.get("call_sid"), dropped=self.dropped)
                if self._waiting and self._waiting[0][1] is event:
                    self._waiting.popleft()
        finally:
            await client.aclose()

    def _drop_old(self) -> None:
        while self._waiting and time.monotonic() - self._waiting[0][0] > MAX_AGE_SECONDS:
            self._waiting.popleft()
            self.dropped += 1

    async def _has_event(self) -> bool:
        """Wait a while for one."""
        if not self._waiting and not self._closing:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._news.wait()
        return bool(self._waiting)

    async def _deliver(self, client: httpx.AsyncClient, event: dict[str, Any]) -> bool:
        """True once the receiver has it; False after the last attempt, or when it will never want it."""
        body = _encode(event)
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            status = await self._attempt(client, body, event)
            if 200 <= status < 300:
                return True
            log("webhook failed", level="warning", call_sid=event.get("call_sid"), status=status, attempt=attempt)
            if attempt == ATTEMPTS or (0 < status < 500 and status not in REPEATABLE):
                break
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)
        return False

    async def _attempt(self, client: httpx.AsyncClient, body: bytes, event: dict[str, Any]) -> int:
        """The status; 0 if there was no answer, for whatever reason: nothing that a receiver does ends the sender."""
        headers = {
            "content-type": "application/json",
            "x-napscribe-event": str(event.get("type")),
            "x-napscribe-delivery": f"{event.get('call_sid')}:{event.get('id')}",
        }
        if self._secret:
            digest = hmac.new(self._secret, body, hashlib.sha256).hexdigest()
            headers["x-napscribe-signature"] = f"sha256={digest}"
        try:
            return (await client.post(self._url, content=body, headers=headers)).status_code
        except Exception as error:
            log("webhook unreachable", level="warning", error=type(error).__name__)
            return 0


def _client() -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False)
