"""One log line, one JSON object, on standard error: ``time``, ``level``, ``event`` and whatever belongs to it.

Keys and transcripts are never logged.
"""

from __future__ import annotations

import sys
import time

import msgspec

_encoder = msgspec.json.Encoder(enc_hook=str)
_common: dict[str, object] = {}


def bind(**fields: object) -> None:
    """Fields that every later line of this process carries (``process``, ``generation``, ``pid``)."""
    _common.update(fields)


def log(event: str, *, level: str = "info", **fields: object) -> None:
    """Write one line. A reader that is gone is not an error of ours."""
    line = {"time": round(time.time(), 3), "level": level, "event": event, **_common, **fields}
    try:
        sys.stderr.write(_encoder.encode(line).decode() + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
