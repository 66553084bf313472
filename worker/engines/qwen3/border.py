"""Where a text ends among the tokens that spell it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def border(pieces: Sequence[bytes], text: str) -> tuple[int, str]:
    """How many of the tokens spell a beginning of ``text``, and what is missing of it then.

    ``pieces``: bytes of each token; bytes that are no UTF-8 stand for U+FFFD. White space in front of the first and of
    ``text`` is not compared. Nothing is missing where the text ends between two tokens; where it ends inside one, or says
    something else, what is missing has to be tokenised anew. The border never falls inside a character.
    """
    wanted = text.strip()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    spelled, count, length = "", 0, 0
    for number, piece in enumerate(pieces, start=1):
        spelled = (spelled + utf8.decode(piece)).lstrip()
        if not wanted.startswith(spelled):
            break
        if not utf8.getstate()[0]:
            count, length = number, len(spelled)
        if len(spelled) == len(wanted):
            break
    if length == len(wanted):
        return count, ""
    # Where nothing fits, white space in front belongs to what is missing.
    return count, wanted[length:] if length else text.rstrip()
