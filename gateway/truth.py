"""Yes or no, as clients write it."""

from __future__ import annotations

_YES = frozenset({"true", "1", "yes", "on"})
_NO = frozenset({"false", "0", "no", "off"})


def truth(value: str) -> bool | None:
    """What a value means, in any case, with spaces around; None if it is neither, or empty."""
    bare = value.strip().lower()
    return True if bare in _YES else False if bare in _NO else None
