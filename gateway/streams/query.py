"""Values in the query of a WebSocket handshake, checked. All raise BadRequest with the field in ``param``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gateway.truth import truth
from shared.errors import BadRequest

Fields = Mapping[str, str]

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Hz: what the decoder takes."""
MAX_TEXT = 10_000
"""Characters of a prompt; more is cut by every model anyway."""


def text(fields: Fields, name: str, limit: int = MAX_TEXT) -> str:
    value = fields.get(name, "")
    if len(value) > limit:
        raise BadRequest(f"{name} has more than {limit} characters.", param=name)
    return value


def flag(fields: Fields, name: str, *, default: bool) -> bool:
    """``true`` or ``false`` in any of their spellings; empty is the default."""
    value = fields.get(name, "").strip()
    meant = truth(value) if value else default
    if meant is None:
        raise BadRequest(f"{name} is neither true nor false: {value[:40]!r}.", param=name)
    return meant


def choice(fields: Fields, name: str, choices: Sequence[str]) -> str:
    """One of ``choices``; the first where the field is missing or empty."""
    value = fields.get(name, "").strip().lower() or choices[0]
    if value not in choices:
        raise BadRequest(f"{name} cannot be {value[:40]!r}.", hint=f"It is one of {', '.join(choices)}.", param=name)
    return value


def number(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name, "").strip()
    if not value:
        return default
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not low <= parsed <= high:  # false for NaN
        raise BadRequest(f"{name} cannot be {value[:40]!r}.", hint=f"It is from {low:g} to {high:g}.", param=name)
    return parsed


def whole(fields: Fields, name: str, default: int, low: int, high: int) -> int:
    value = number(fields, name, default, low, high)
    if value != int(value):
        raise BadRequest(f"{name} is a whole number, not {value:g}.", param=name)
    return int(value)


def sample_rate(fields: Fields, default: int) -> int:
    """Hz."""
    return whole(fields, "sample_rate", default, MIN_RATE, MAX_RATE)
