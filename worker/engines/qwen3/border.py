"""Where a text ends among the tokens that spell it."""

from __future__ import annotations

from collections.abc import Sequence


def border(pieces: Sequence[bytes], text: str) -> tuple[int, str]:
    """How many of the tokens spell a beginning of ``text``, and what is missing of it then.

    ``pieces``: bytes of each token. White space in front of the first and of ``text`` is not compared. Nothing is missing
    where the text ends between two tokens; where it ends inside one, or says something else, what is missing has to be
    tokenised anew. The border never falls inside a character.
    """
    want = text.strip()
    wanted = want.encode()
    spelled, fits = b"", [0]
    for piece in pieces:
        spelled += piece
        bare = spelled.lstrip()
        if not wanted.startswith(bare):
            break
        fits.append(len(bare))
        if len(bare) == len(wanted):
            return len(fits) - 1, ""
    while True:
        count, at = len(fits) - 1, fits.pop()
        try:
            missing = wanted[at:].decode()
        except UnicodeDecodeError:
            continue
        # Nothing fits: the white space in front belongs to what is missing.
        return count, missing if at else text.rstrip()
