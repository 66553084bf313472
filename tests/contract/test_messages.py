"""Every message makes the round trip; anything else is a typed error, never a hang and never another exception."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import ProtocolError
from shared.messages import (
    Capabilities,
    Command,
    Event,
    FileOptions,
    FileTimings,
    Lane,
    RawAudio,
    Word,
)

COMMANDS = typing.get_args(Command)
EVENTS = typing.get_args(Event)


def example(kind: type) -> object:
    """A value of every type that occurs in a message, no field at its default."""
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: of_type(hints[name]) for name in kind.__struct_fields__})
    raise TypeError(kind)


def of_type(hint: object) -> object:
    simple: dict[object, object] = {int: 7, str: "wörter", float: 2.5, bool: True, Lane: Lane.INTERACTIVE}
    if hint in simple:
        return simple[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return (of_type(arguments[0]), of_type(arguments[0]))
    if origin is tuple:
        return tuple(of_type(argument) for argument in arguments)
    if origin is dict:
        return {of_type(arguments[0]): of_type(arguments[1])}
    if arguments:
        return of_type(arguments[0])
    assert isinstance(hint, type)
    return example(hint)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_commands_make_the_round_trip(kind: type) -> None:
    message = example(kind)
    assert codec.decode_command([codec.encode(message), b"pcm"]) == (message, b"pcm")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_events_make_the_round_trip(kind: type) -> None:
    message = example(kind)
    assert codec.decode_event([codec.encode(message)]) == (message, b"")  # type: ignore[arg-type]


def test_helpers_cover_the_nested_types() -> None:
    for kind in (Capabilities, FileOptions, FileTimings, RawAudio, Word):
        assert isinstance(example(kind), kind)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_an_event_is_no_command(kind: type) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_command([codec.encode(example(kind))])  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_a_typed_error(frames: list[bytes]) -> None:
    for decode in (codec.decode_command, codec.decode_event):
        try:
            decode(frames)
        except ProtocolError:
            continue
        raise AssertionError(frames)


def test_a_deeply_nested_header_is_a_typed_error() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_event([b"\x91" * 100_000])
