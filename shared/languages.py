"""Names of languages: ISO 639-1 (or 639-3 where there is none) codes, English names, regions, and what clients send."""

from __future__ import annotations

from collections.abc import Collection

from shared.errors import BadRequest

NAMES: dict[str, str] = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""The 30 languages of Qwen3-ASR; every engine's languages are a subset."""

_ALIASES: dict[str, str] = {
    "tl": "fil",
    "tagalog": "fil",
    "farsi": "fa",
    "mandarin": "zh",
    "cmn": "zh",
    "castilian": "es",
    "zh-hk": "yue",
    "zh-yue": "yue",
} | {name.lower(): code for code, name in NAMES.items()}

_AUTOMATIC = {"", "auto", "automatic", "none", "null", "multi", "und"}


def parse_language(value: str, *, param: str = "language") -> str:
    """The code of what a client sent: ``en``, ``en-US``, ``en_us``, ``English``; empty for automatic.

    Raises BadRequest for a name that is no language we know.
    """
    text = value.strip().lower().replace("_", "-")
    if text in _AUTOMATIC:
        return ""
    for candidate in (text, text.split("-")[0]):
        code = _ALIASES.get(candidate, candidate)
        if code in NAMES:
            return code
    raise BadRequest(
        f"Unknown language {value!r}.",
        hint="Send an ISO 639-1 code such as 'en', an English name such as 'english', or leave it out.",
        param=param,
    )


def require_spoken(code: str, spoken: Collection[str], *, param: str = "language") -> None:
    """Raises BadRequest for a language that the model does not know; ``spoken`` is empty while nobody knows which it does.

    Text in another language than the one asked for would be wrong in silence.
    """
    if not code or not spoken or code in spoken:
        return
    known = ", ".join(sorted(spoken))
    raise BadRequest(
        f"The model does not know {NAMES.get(code, code)}.",
        hint=f"It knows {known}. NAPSCRIBE_MODEL chooses another model." if len(spoken) < 20 else f"It knows {known}.",
        param=param,
    )


def require_one_spoken(codes: Collection[str], spoken: Collection[str], *, param: str = "languages") -> None:
    """As ``require_spoken`` for sound that may be in any of several languages: one of them is enough."""
    if codes and spoken and not set(codes) & set(spoken):
        require_spoken(min(codes), spoken, param=param)


def language_name(code: str) -> str:
    """English name in lower case, as whisper-1 reports it; empty for an unknown or empty code."""
    return NAMES.get(code, "").lower()
