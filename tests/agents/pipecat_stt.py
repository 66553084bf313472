"""``python pipecat_stt.py URL KEY CLIP.wav``: pipecat's realtime service in a pipeline, on a recording at the pace of speech.

Its own way: voice activity is judged in the pipeline, whose end of speech becomes a commit. Prints a JSON list of [kind,
text]. Runs in an environment of its own (``test_agents``).
"""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import asyncio
import json
import sys
import wave
from typing import Any

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService


class Ear(FrameProcessor):  # type: ignore[misc]
    """Keeps what comes out of the service."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str]] = []
        self.final = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            self.heard.append(("final", frame.text))
            self.final.set()
        elif isinstance(frame, InterimTranscriptionFrame):
            self.heard.append(("interim", frame.text))
        elif isinstance(frame, ErrorFrame):
            self.heard.append(("error", str(frame.error)))
            self.final.set()
        await self.push_frame(frame, direction)


async def speak(task: Any, path: str, ear: Ear) -> None:
    with wave.open(path) as clip:
        rate, pcm = clip.getframerate(), clip.readframes(clip.getnframes())
    await task.queue_frame(VADUserStartedSpeakingFrame())
    for at in range(0, len(pcm), rate // 25):
        await task.queue_frame(InputAudioRawFrame(pcm[at : at + rate // 25], rate, 1))
        await asyncio.sleep(0.02)
    await task.queue_frame(VADUserStoppedSpeakingFrame())
    await ear.final.wait()
    await task.queue_frame(EndFrame())


async def main(url: str, key: str, path: str) -> None:
    service = OpenAIRealtimeSTTService(
        api_key=key,
        base_url=f"{url.replace('http', 'ws', 1)}/v1/realtime",
        settings=OpenAIRealtimeSTTService.Settings(model="gpt-4o-transcribe"),
    )
    ear = Ear()
    task = PipelineTask(Pipeline([service, ear]), params=PipelineParams(audio_in_sample_rate=16000))
    runner = PipelineRunner(handle_sigint=False)
    await asyncio.gather(runner.run(task), speak(task, path, ear))
    print(json.dumps(ear.heard))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
