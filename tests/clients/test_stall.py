"""A client that stops sending in mid-utterance, without silence and without a word: it gets its final all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.clients.pace import s16, speech_only
from tests.clients.test_live_native import BYTES_PER_SECOND, FIRST, MODEL, SECOND, file_text, talking, tells_of
from tests.server import Server
from tests.speech import clip
from worker.live.playout import STALL_NS

STALL_SECONDS = STALL_NS / 1e9


async def test_a_gated_microphone_gets_its_finals(server: Server) -> None:
    """Two utterances with nothing between them but time. Their times are those of the audio, in which there was no pause."""
    await asyncio.to_thread(server.http.post, f"/api/ps/{MODEL}")
    first, second = speech_only(clip(FIRST)), speech_only(clip(SECOND))
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        await talk.say(s16(first))
        spoken = time.monotonic()
        final = await talk.until("final")
        assert time.monotonic() - spoken >= STALL_SECONDS * 0.9, "it did not wait for more"
        assert final["cause"] == "stall"
        await talk.say(s16(second))
        await talk.until("final", 2)
        await talk.close()
    assert [event["cause"] for event in talk.of("final")] == ["stall", "stall"]
    for number, name in enumerate((FIRST, SECOND)):
        tells_of(await asyncio.to_thread(file_text, server, name), talk.of("final")[number]["text"])
    (_, end), (begin, last) = [(event["start"], event["end"]) for event in talk.of("final")]
    assert end <= begin < last <= (len(first) + len(second)) / 16_000


async def test_what_a_worker_leaves_open_ends_with_the_next_one(server: Server) -> None:
    """It dies while the client is silent. The next one hears what there was, and waits as long as ever for more."""
    await asyncio.to_thread(server.http.post, f"/api/ps/{MODEL}")
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        await talk.say(s16(speech_only(clip(FIRST))))
        os.kill(await asyncio.to_thread(server.worker_pid), signal.SIGKILL)
        final = await talk.until("final")
        await talk.close()
    assert final["cause"] == "stall"
    tells_of(await asyncio.to_thread(file_text, server, FIRST), talk.text)
    assert len(talk.of("speech_started")) == len(talk.of("speech_stopped")) == len(talk.of("final")) == 1
    assert not talk.of("error")


async def test_only_the_client_ends_an_utterance_that_it_said_it_would_end(server: Server) -> None:
    """Push to talk, and somebody who thinks for a while with the finger on the button."""
    sound = s16(speech_only(clip(FIRST)))
    half = len(sound) // 4 * 2
    async with talking(server, "language=en&endpointing=manual") as talk:
        await talk.until("ready")
        await talk.socket.send(sound[:half])
        await talk.until("speech_started")
        await asyncio.sleep(half / BYTES_PER_SECOND + STALL_SECONDS + 1)
        await talk.socket.send(sound[half:])
        await talk.control("finalize")
        await talk.until("final")
        await talk.close()
    assert [event["cause"] for event in talk.of("final")] == ["request"]
    tells_of(await asyncio.to_thread(file_text, server, FIRST), talk.text)


async def test_a_worker_that_stood_still_does_not_blame_the_client(server: Server) -> None:
    """A suspended machine, or one that swaps: when it goes on, the audio of all that time is still in its socket."""
    await asyncio.to_thread(server.http.post, f"/api/ps/{MODEL}")
    pid = await asyncio.to_thread(server.worker_pid)
    async with talking(server, "language=en") as talk:
        await talk.until("ready")
        saying = asyncio.ensure_future(talk.say(s16(clip("jfk")[: 7 * 16_000])))
        await talk.until("speech_started")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STALL_SECONDS + 0.7)
        os.kill(pid, signal.SIGCONT)
        await saying
        await talk.close()
    assert await asyncio.to_thread(server.worker_pid) == pid
    assert talk.of("final")
    assert "stall" not in [event["cause"] for event in talk.of("final")]
