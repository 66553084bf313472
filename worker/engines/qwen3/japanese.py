"""Japanese text as morphemes, by nagisa: a small network (bidirectional LSTM, no download) with a dictionary, in its package.

nagisa reads compatibility characters as what they stand for (NFKC: ``㌔`` is ``キロ``, ``１`` is ``1``), so a morpheme may be
written otherwise than the text is. Where each of its characters comes from is found by normalising the text in parts.
"""

from __future__ import annotations

import logging
import sys
import unicodedata
from collections.abc import Callable
from functools import cache

from shared.errors import EngineFailed, Unsupported


def morphemes(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The morphemes of ``text``, and for each of their characters the span ``(start, end)`` of ``text`` that it stands for.

    White space and punctuation are morphemes, too. Linear in the length: about 25,000 characters a second on one core.
    ``text`` must not end with white space. Raises Unsupported without nagisa.
    """
    found = load()(text)
    origins = origins_of_normalized(text)
    if sum(map(len, found)) != len(origins):
        raise EngineFailed("nagisa gives other characters than it was given.", hint="Install nagisa 0.3.")
    return found, origins


@cache
def load() -> Callable[[str], list[str]]:
    """The analyser. The first call takes about 3 s and 160 MB, so it is made only when it is needed.

    Raises Unsupported if nagisa is not installed or does not run here.
    """
    root = logging.getLogger()
    handlers, level, path = root.handlers[:], root.level, sys.path[:]
    try:
        import nagisa
    # A build for another numpy says so with a ValueError, a damaged model file with whatever reading it raises.
    except Exception as error:
        raise Unsupported(
            f"Japanese words need nagisa for exact times ({error}).", hint="pip install 'napscribe[aligner]'"
        ) from error
    finally:
        # Its module for training sets up the log of the whole process, and with its folder on the path, names as plain as
        # "model" could be imported from there.
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.path[:] = path
    wakati: Callable[[str], list[str]] = nagisa.wakati
    return wakati


def origins_of_normalized(text: str) -> list[tuple[int, int]]:
    """For each character of the NFKC form of ``text`` the span of ``text`` that it comes from, never falling.

    The text is cut where normalisation cannot reach across (UAX #15, section 9: before a starter that composes with nothing
    before it), so that the forms of the parts, joined, are the form of the whole.
    """
    origins: list[tuple[int, int]] = []
    start = 0
    for n, char in enumerate(text):
        alone = _nfkc(char)
        # Marks never begin a part, and asking about each in a long run of them would take quadratic time.
        if n == start or unicodedata.combining(alone[0]):
            continue
        form = _nfkc(text[start:n])
        if _nfkc(text[start : n + 1]) == form + alone:
            origins += [(start, n)] * len(form)
            start = n
    return origins + [(start, len(text))] * len(_nfkc(text[start:]))


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)
