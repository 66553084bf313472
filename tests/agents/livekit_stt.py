"""``python livekit_stt.py URL KEY CLIP.wav``: LiveKit's OpenAI plugin, as an agent uses it, on a recording at the pace of speech.

Prints a JSON list of [kind, text]. Runs in an environment of its own (``test_agents``).
"""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import asyncio
import json
import sys
import wave

import aiohttp
from livekit import rtc
from livekit.agents import utils
from livekit.agents.stt import SpeechEventType as Kind
from livekit.plugins import openai

SILENCE_SECONDS = 1.5


def finished(heard: list[tuple[str, str]]) -> bool:
    """Usage comes once for every turn that began, after its final."""
    kinds = [kind for kind, _ in heard]
    turns = kinds.count(Kind.START_OF_SPEECH.value)
    return turns > 0 and kinds.count(Kind.RECOGNITION_USAGE.value) >= turns


async def main(url: str, key: str, path: str) -> None:
    with wave.open(path) as clip:
        rate, pcm = clip.getframerate(), clip.readframes(clip.getnframes())
    pcm += bytes(int(SILENCE_SECONDS * rate) * 2)
    heard: list[tuple[str, str]] = []
    async with aiohttp.ClientSession() as session:
        plugin = openai.STT(model="gpt-4o-transcribe", base_url=f"{url}/v1", api_key=key, use_realtime=True)
        plugin._session = session
        stream = plugin.stream()

        async def listen() -> None:
            async for event in stream:
                text = event.alternatives[0].text if event.alternatives else ""
                heard.append((event.type.value, text))

        listening = asyncio.ensure_future(listen())
        step = rate // 50
        for at in range(0, len(pcm) // 2 - step, step):
            stream.push_frame(rtc.AudioFrame(pcm[at * 2 : (at + step) * 2], rate, 1, step))
            await asyncio.sleep(0.02)
        while not finished(heard):
            await asyncio.sleep(0.05)
            if listening.done():
                await listening
        await stream.aclose()
        await plugin.aclose()
        await utils.aio.cancel_and_wait(listening)
    print(json.dumps(heard))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
