"""``X-Twilio-Signature`` of a WebSocket handshake: HMAC-SHA1 over the URL, keyed with the account's auth token.

Twilio signs the URL as it was written in the TwiML. A proxy in front of us may have changed scheme, host and port, so every
URL that this one can have been is tried; each still takes the auth token to sign.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from collections.abc import Iterator, Mapping

HEADER = "x-twilio-signature"
_SCHEMES = ("wss", "https", "ws", "http")
_HOSTS = ("host", "x-forwarded-host")


def is_signed(auth_token: str, headers: Mapping[str, str], target: str) -> bool:
    """Whether the handshake carries Twilio's signature. ``target`` is path and query as they came."""
    presented = headers.get(HEADER, "").encode("utf-8", "replace")
    matches = [hmac.compare_digest(presented, sign(auth_token, url)) for url in _urls(headers, target)]
    return bool(presented) and any(matches)


def sign(auth_token: str, url: str) -> bytes:
    """The header's value for a request without parameters."""
    digest = hmac.new(auth_token.encode(), url.encode("utf-8", "surrogateescape"), hashlib.sha1).digest()
    return binascii.b2a_base64(digest, newline=False)


def _urls(headers: Mapping[str, str], target: str) -> Iterator[str]:
    path, mark, query = target.partition("?")
    targets = {target, f"{path.rstrip('/')}{mark}{query}", f"{path.rstrip('/')}/{mark}{query}"}
    hosts = {headers[name].split(",")[0].strip() for name in _HOSTS if headers.get(name)}
    hosts |= {host.rpartition(":")[0] for host in hosts if host.rpartition(":")[2].isdigit() and ":" in host}
    for host in hosts:
        for scheme in _SCHEMES:
            for end in targets:
                yield f"{scheme}://{host}{end}"
