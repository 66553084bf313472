"""The bound over all live streams; what a single one does is tried in ``test_live_core`` and over real sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.life.channel import Channel
from gateway.life.supervisor import Supervisor
from gateway.streams.hub import Hub
from gateway.streams.live import LiveStream
from shared.errors import TooManyStreams
from shared.streams import StreamOptions
from shared.wire import RawAudio

SECOND = bytes(32_000)


async def test_streams_that_hold_most_end_when_all_hold_too_much(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No worker comes, and everybody talks on: memory stays bounded, and the others keep what they have said."""
    channel = Channel(tmp_path_factory.mktemp("s"), lambda _event, _payload: None, lambda *_garbage: None)
    hub = Hub(channel, 60, max_held_bytes=10 * len(SECOND))
    absent = SimpleNamespace(languages=(), lease=lambda: SimpleNamespace(release=lambda: None))
    hub.supervisor = cast(Supervisor, absent)
    try:
        options = StreamOptions(RawAudio("s16le", 16_000))
        streams = [hub.open(name, options) for name in ("little", "much", "some")]
        for stream, seconds in zip(streams, (1, 8, 4), strict=True):
            await stream.send(seconds * SECOND)
        little, much, some = streams
        with pytest.raises(TooManyStreams):
            await asyncio.wait_for(_read(much), 5)
        assert hub.report()["held_bytes"] == 5 * len(SECOND)
        assert (little.error, some.error) == (None, None)
        for stream in streams:
            hub.close(stream)
        assert hub.report()["open"] == 0
    finally:
        channel.close()


async def _read(stream: LiveStream) -> None:
    async for _ in stream.events():
        pass
