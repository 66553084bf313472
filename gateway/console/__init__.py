"""The web console on ``/``: one page and one script, sent from the disk by the HTTP server and never held in memory.

They need no key, as a browser brings none when it opens a page; everything they do then does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

_HERE = Path(__file__).parent
_FILES = {
    "/": ("index.html", "text/html"),
    "/console.js": ("console.js", "text/javascript"),
}
PATHS = frozenset(_FILES)
"""Open without a key."""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[Route]:
    return [Route(path, _file) for path in _FILES]


async def _file(request: Request) -> Response:
    name, media_type = _FILES[request.url.path]
    return FileResponse(_HERE / name, media_type=media_type, headers=_HEADERS)
