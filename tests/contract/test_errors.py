"""The error tree: every code has its HTTP status, is drawn in the docstring, and survives the wire."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from shared import errors
from shared.errors import NapscribeError

CLASSES = [thing for _, thing in inspect.getmembers(errors, inspect.isclass) if issubclass(thing, NapscribeError)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_code_status_and_drawing(cls: type[NapscribeError]) -> None:
    assert re.fullmatch(r"[a-z][a-z_]+", cls.code)
    assert 400 <= cls.http_status <= 599
    assert "code" in vars(cls), "every class has a code of its own"
    if not cls.__subclasses__():
        drawn = re.search(rf"{cls.__name__}\s+(\d+)\s+(\w+)", errors.__doc__ or "")
        assert drawn, "drawn in the docstring"
        assert (int(drawn[1]), drawn[2]) == (cls.http_status, cls.code)


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_from_code_gives_the_class_back(cls: type[NapscribeError]) -> None:
    assert type(errors.from_code(cls.code, "x")) is cls


def test_no_error_is_defined_elsewhere() -> None:
    """Another module's own subclass would have no place in the drawing."""
    names = "|".join(cls.__name__ for cls in CLASSES)
    pattern = re.compile(rf"^class \w+\((?:errors\.)?(?:{names})\)", re.MULTILINE)
    for package in ("gateway", "worker", "shared"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "errors.py":
                assert not pattern.search(path.read_text()), path


def test_retryable_ones_are_those_that_clients_retry() -> None:
    """The openai SDK retries 408, 409, 429 and 5xx."""
    for cls in CLASSES:
        if cls.retryable:
            assert cls.http_status in {429, 503}
