"""Subtitles: readable cues out of timed words, as SubRip and as WebVTT.

A cue has at most two lines of 42 columns and stays at most 7 s, the usual limits of broadcasters for adult programmes
(Netflix, Timed Text Style Guide: 42 characters a line, two lines, 7 s). Where to cut is chosen among all the places
that these limits allow: the end of a sentence, of a clause, a pause; a single word on its own only if it stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from gateway.answers.timed_text import Token, timed_tokens
from gateway.answers.transcript import Transcript
from shared.scripts import separator

MAX_COLUMNS = 42
MAX_LINES = 2
MAX_MS = 7000

_LEAST_MS = 1000
"""A cue stays on screen this long if the next one leaves it the time."""

_MS_PER_COLUMN = 1000 / 17
"""Reading speed: 17 characters a second."""

_PARAGRAPH_MS = 2000
"""A pause after which a cue never goes on."""

_BREATH_MS = 300
"""A pause worth cutting at."""

_WHOLE = 4.0
"""Merit of not cutting: more than the end of a sentence, less than one with a pause behind it."""

_SENTENCE_ENDS = frozenset(".!?。！？…؟।")
_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "sr", "sra", "jr", "nr", "vs", "hr", "fr", "mme", "bzw"}
)
_CLAUSE_ENDS = frozenset(",;:،、，；：—–")
_CLOSERS = "\"'”’»)]）」』】"


class Cue(NamedTuple):
    start: int
    """Milliseconds from the start of the recording."""
    end: int
    """After ``start``, never after the start of the next one."""
    lines: tuple[str, ...]


def srt(transcript: Transcript) -> str:
    """SubRip; an empty text is an empty document."""
    blocks = [
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n" + "\n".join(cue.lines) + "\n"
        for number, cue in enumerate(cues(transcript), start=1)
    ]
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT; an empty text is the bare header."""
    blocks = [
        f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n" + "\n".join(map(_escape, cue.lines)) + "\n\n"
        for cue in cues(transcript)
    ]
    return "WEBVTT\n\n" + "".join(blocks)


def cues(transcript: Transcript) -> list[Cue]:
    """All cues: in order, not overlapping, every word of the text once."""
    groups = list(_groups(_tokens(transcript)))
    end_of_recording = round(transcript.duration * 1000)
    found: list[Cue] = []
    clock = 0
    for index, group in enumerate(groups):
        start = max(group[0].start, clock)
        limit = groups[index + 1][0].start if index + 1 < len(groups) else max(end_of_recording, group[-1].end)
        clock = _end_of(group, start, limit)
        found.append(Cue(start, clock, _lines(group)))
    return found


def _tokens(transcript: Transcript) -> list[Token]:
    tokens: list[Token] = []
    previous = ""
    for segment in transcript.segments:
        spaced = f"{previous[-1:]}{separator(previous, segment.text)}{segment.text[:1]}"
        glued = bool(previous) and not any(map(str.isspace, spaced))
        tokens += timed_tokens(segment, glued=glued, max_width=MAX_COLUMNS)
        previous = segment.text or previous
    return tokens


def _end_of(group: Sequence[Token], start: int, limit: int) -> int:
    """End of a cue: that of its last word, or later if it could not be read by then, up to ``limit``."""
    wanted = start + max(_LEAST_MS, round(_MS_PER_COLUMN * sum(token.width for token in group)))
    end = max(group[-1].end, min(wanted, limit))
    return max(start + 1, min(end, start + MAX_MS))


def _groups(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Cut the words into cues: at each the best place of those that the limits allow."""
    first = 0
    while first < len(tokens):
        last, whole = _reach(tokens, first)
        cut = _best_cut(tokens, first, last, whole)
        yield tokens[first:cut]
        first = cut


def _reach(tokens: Sequence[Token], first: int) -> tuple[int, bool]:
    """How far a cue from ``first`` may go (exclusive), and whether a paragraph ends there."""
    line, used = 1, 0
    for index in range(first, len(tokens)):
        token = tokens[index]
        if index > first and _pause(tokens, index) >= _PARAGRAPH_MS:
            return index, True
        step = _step(token, index == first)
        if used + step > MAX_COLUMNS:
            line, used, step = line + 1, 0, token.width
        too_long = index > first and token.end - tokens[first].start > MAX_MS
        if line > MAX_LINES or too_long:
            return index, False
        used += step
    return len(tokens), True


def _best_cut(tokens: Sequence[Token], first: int, last: int, whole: bool) -> int:
    """Index after the last word of the cue, in (first, last]."""
    best, best_score = last, float("-inf")
    width = 0
    for cut in range(first + 1, last + 1):
        width += tokens[cut - 1].width + 1
        score = 2 * width / (MAX_LINES * MAX_COLUMNS)
        score += _WHOLE if whole and cut == last else _merit(tokens, first, cut)
        if score >= best_score:
            best, best_score = cut, score
    return best


def _merit(tokens: Sequence[Token], first: int, cut: int) -> float:
    """How good it is to go on with a new cue at ``cut``: about 3 after a sentence, below 0 where a word is left alone or unread."""
    merit = 3.0 if _ends_sentence(tokens[cut - 1]) else 1.5 if _ending(tokens[cut - 1]) in _CLAUSE_ENDS else 0.0
    pause = _pause(tokens, cut)
    if pause >= _BREATH_MS:
        merit += min(2.0, pause / 500)
    if tokens[cut].glued:
        merit -= 0.5
    if cut - first == 1 or _paragraph_ends(tokens, cut + 1) or tokens[cut].start - tokens[first].start < _LEAST_MS:
        merit -= 3.0
    return merit


def _pause(tokens: Sequence[Token], index: int) -> int:
    """Milliseconds of silence before token ``index``."""
    return tokens[index].start - tokens[index - 1].end


def _paragraph_ends(tokens: Sequence[Token], index: int) -> bool:
    return index >= len(tokens) or _pause(tokens, index) >= _PARAGRAPH_MS


def _lines(group: Sequence[Token]) -> tuple[str, ...]:
    """One line if it fits, else two of about the same length, broken after punctuation where that costs little."""
    ends = list(accumulate(_step(token, index == 0) for index, token in enumerate(group)))
    if ends[-1] <= MAX_COLUMNS:
        return (_text(group),)
    cut = min(range(1, len(group)), key=lambda cut: _line_cost(group, ends, cut))
    return _text(group[:cut]), _text(group[cut:])


def _line_cost(group: Sequence[Token], ends: Sequence[int], cut: int) -> float:
    upper = ends[cut - 1]
    lower = ends[-1] - ends[cut] + group[cut].width
    overflow = max(0, upper - MAX_COLUMNS, lower - MAX_COLUMNS)
    punctuated = _ends_sentence(group[cut - 1]) or _ending(group[cut - 1]) in _CLAUSE_ENDS
    return 1000 * overflow + abs(upper - lower) - (12 if punctuated else 0)


def _step(token: Token, begins_line: bool) -> int:
    """Columns that a token adds to its line."""
    return token.width if begins_line or token.glued else token.width + 1


def _ends_sentence(token: Token) -> bool:
    """Whether a sentence may end here: not behind a title, an initial or a number (``Mr.``, ``J.``, ``3.``)."""
    text = token.text.rstrip(_CLOSERS)
    if text[-1:] != ".":
        return text[-1:] in _SENTENCE_ENDS
    stem = text[:-1].lower()
    return len(stem) > 1 and stem not in _ABBREVIATIONS and not stem.isdecimal()


def _ending(token: Token) -> str:
    """Last character of a token, closing quotes and brackets aside."""
    return token.text.rstrip(_CLOSERS)[-1:]


def _text(group: Sequence[Token]) -> str:
    return group[0].text + "".join(token.text if token.glued else f" {token.text}" for token in group[1:])


def _clock(milliseconds: int, point: str) -> str:
    seconds, fraction = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{fraction:03d}"


def _escape(line: str) -> str:
    """Text as WebVTT wants it: these three begin its markup."""
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
