"""Calls whose audio comes in a container: a decoder of its own runs behind the socket, and nothing may depend on how far."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.clients.pace import s16
from tests.clients.test_live_native import BYTES_PER_SECOND, FIRST, SECOND, file_text, talking, tells_of
from tests.server import Server
from tests.speech import clip, encode, silence


@pytest.mark.parametrize("container", [("webm", "libopus"), ("ogg", "libopus")], ids=lambda pair: pair[0])
async def test_what_a_browser_records(server: Server, container: tuple[str, str]) -> None:
    """Opus in a container written as it goes, in pieces."""
    data = encode(clip(SECOND), *container, rate=48_000, seekable=False)
    async with talking(server, "encoding=container") as talk:
        for start in range(0, len(data), 1_000):
            await talk.socket.send(data[start : start + 1_000])
        await talk.close()
    tells_of(await asyncio.to_thread(file_text, server, SECOND), talk.text)


@pytest.mark.parametrize("container", [("webm", "libopus"), ("ogg", "libopus")], ids=lambda pair: pair[0])
async def test_finalize_belongs_behind_all_that_was_recorded(server: Server, container: tuple[str, str]) -> None:
    """A decoder of its own runs behind the socket; a command waits until it has used up what came before."""
    data = encode(np.concatenate([clip(SECOND), silence(0.3)]), *container, rate=48_000, seekable=False)
    async with talking(server, "encoding=container") as talk:
        for start in range(0, len(data), 4_000):
            await talk.socket.send(data[start : start + 4_000])
        await talk.control("finalize")
        await talk.until("finalized")
        assert len(talk.of("final")) == 1
        text = talk.text
        await talk.close()
        assert [final["text"] for final in talk.of("final")[1:] if final["text"]] == []
    tells_of(await asyncio.to_thread(file_text, server, SECOND), text)


async def test_a_recording_is_heard_without_further_bytes(server: Server) -> None:
    data = encode(np.concatenate([clip(SECOND), silence(1.5)]), "webm", "libopus", rate=48_000, seekable=False)
    async with talking(server, "encoding=container") as talk:
        await talk.socket.send(data)
        assert (await talk.until("final"))["cause"] == "silence"
        tells_of(await asyncio.to_thread(file_text, server, SECOND), talk.text)


async def test_what_was_recorded_and_cleared_is_not_said(server: Server) -> None:
    data = encode(clip(SECOND), "webm", "libopus", rate=48_000, seekable=False)
    async with talking(server, "encoding=container") as talk:
        await talk.socket.send(data)
        await talk.control("clear")
        await talk.until("cleared")
        await talk.close()
        assert "".join(final["text"] for final in talk.of("final")) == ""


async def test_what_is_no_container_is_refused_soon(server: Server) -> None:
    """Headerless PCM, a usual mistake: a second of it is enough to know, and nothing else need come."""
    async with talking(server, "encoding=container") as talk:
        await talk.socket.send(s16(clip(SECOND))[:BYTES_PER_SECOND])
        assert (await talk.until("error"))["code"] == "unsupported_audio"


async def test_a_container_that_is_none_is_a_typed_error(server: Server) -> None:
    async with talking(server, "encoding=container") as talk:
        await talk.socket.send(b"not audio at all " * 4000)
        await talk.control("close")
        await talk.over()
        assert talk.of("error")[0]["code"] == "unsupported_audio"
        assert talk.socket.close_code == 1008


async def test_bytes_behind_the_end_of_a_container_stop_nobody(server: Server) -> None:
    """AIFF names its length, and its decoder ends there. More pieces than its queue holds must not hold up other calls."""
    data = encode(clip(FIRST), "aiff", "pcm_s16be")
    async with talking(server, "encoding=container") as talk:
        await talk.socket.send(data)
        await talk.until("speech_started")
        for _ in range(600):
            await talk.socket.send(b"more")
        async with talking(server) as other:
            await other.socket.send(s16(clip(SECOND)))
            await other.close()
            tells_of(await asyncio.to_thread(file_text, server, SECOND), other.text)
        await talk.close()
        tells_of(await asyncio.to_thread(file_text, server, FIRST), talk.text)
