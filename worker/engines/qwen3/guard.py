"""Ends run-aways inside the loop: a model that repeats itself would go on until its budget, and delay everybody.

*Runs*: the last tokens are one pattern over and over; the device looks for them at every token that it chooses (``verdicts``).
*Density*: the recent text compresses far better than speech does, which finds alternations that are no exact run; it is measured in
bytes, so the host looks, every few tokens. Real speech repeats itself too ("no, no, no", digits), so the thresholds are far above
what people say, and follow the published ones (a character more than 20 times, a pattern at least 20 times) where a pattern is
short.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

CHECK_EVERY = 8
"""Tokens between two looks at the density."""
KEPT_REPEATS = 2
"""What is left of a run: as much as the streaming guard may have let out before the third repeat."""
MAX_PERIOD = 40
"""Tokens of the longest pattern that is looked for."""
MIN_REPEATS = 6
"""Copies of a pattern that make a run-away …"""
SINGLE_REPEATS = 20
"""… and tokens that it has at least, however short the pattern."""
_DENSITY_BYTES = 256
"""Of text that the density is measured over, the last ones."""
_DENSITY = 4.2
"""Bytes per compressed byte in such a window: plain speech has less than 2, spoken digits 2.7, two words at random 4.7
to 7.5 (measured on 200 draws each)."""


def visible(tokens: Sequence[int]) -> int:
    """How many of the tokens may be shown: all up to the third repeat of a pattern that is still going on.

    Never more than what ``kept_of_run`` keeps of the same run later, so nothing shown is ever taken back. Costs next to
    nothing where the last token is none of those before it.
    """
    length = len(tokens)
    last = tokens[-1] if tokens else -1
    shown = length
    for period in range(1, min(MAX_PERIOD, (length - 1) // 2) + 1):
        if tokens[length - 1 - period] == last:
            start = _start_of_run(tokens, period)
            if length - start > 2 * period:
                shown = min(shown, start + KEPT_REPEATS * period)
    return shown


def span_of_runaway(period: int) -> int:
    """Tokens of a run of ``period`` that nobody says."""
    return period * max(MIN_REPEATS, -(-SINGLE_REPEATS // period))


def kept_of_run(tokens: Sequence[int], period: int) -> int:
    """How many of the tokens were good, where the last ones are a run."""
    return _start_of_run(tokens, period) + KEPT_REPEATS * period


def _start_of_run(tokens: Sequence[int], period: int) -> int:
    start = len(tokens) - period
    while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    return start


def _compressed(text: bytes) -> int:
    """Bytes that zlib makes of it, with no more memory than such a window needs: setting up the usual 256 KB takes six times as long
    as the rest, and the loop looks at every row again and again. The same within 5 bytes, and the same verdict on 2,200 draws."""
    squeeze = zlib.compressobj(6, zlib.DEFLATED, 9, 3)
    return len(squeeze.compress(text)) + len(squeeze.flush())


def kept_of_dense(tokens: Sequence[int], text_of: Sequence[bytes]) -> int | None:
    """How many of the tokens were good, where the last ones are denser than speech; None where they are not. ``text_of``: bytes of
    each token. Linear in the window, not in the length."""
    start, size = len(tokens), 0
    while start > 0 and size < _DENSITY_BYTES:
        start -= 1
        size += len(text_of[start])
    if size < _DENSITY_BYTES:
        return None
    text = b"".join(text_of[start:])
    if len(text) <= _DENSITY * _compressed(text):
        return None
    # The window turns dense while its beginning is still good; losing words is worse than keeping some junk.
    return start + (len(tokens) - start) // 8
