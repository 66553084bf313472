"""One file's journey through the gateway, over as many generations of the worker as it takes.

Everything the worker has finished is kept here and never asked for again; a reader follows the growing list with a
cursor of its own, so a slow reader holds nothing up and nothing is copied into a queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from shared.errors import NapscribeError
from shared.messages import Delta, FileDone, FileOptions, FileTimings, Lane, SegmentDone, TranscribeFile


class FileJob:
    """State of a request. Written by the dispatcher only."""

    def __init__(self, request_id: str, lane: Lane, path: Path, options: FileOptions) -> None:
        self.request_id = request_id
        self.lane = lane
        self.path = path
        self.options = options
        self.segments: list[SegmentDone] = []
        self.open_deltas: list[Delta] = []
        """Words of the open segment that have been handed out."""
        self.done: FileDone | None = None
        self.error: NapscribeError | None = None
        self.suspect = False
        self.crashes = 0
        """Crashes that count against this job since it last moved on."""
        self.restarts = 0
        """Generations that had to take over."""
        self.redone_segments = 0
        """Segments that were in hand when a worker died, and so were recognised again."""
        self.abandoned = False
        self.timings = FileTimings()
        self.submitted_ns = time.monotonic_ns()
        self.queued_ns = 0
        """Time in the lane, without the worker's start."""
        self.spawn_ns = 0
        """Time spent waiting for a worker to become ready."""
        self.dispatched_ns = 0
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.done is not None or self.error is not None

    def command(self, generation: int) -> TranscribeFile:
        """What the worker of this generation is to do: all of it, or what is left."""
        base = self.segments[-1].end_sample if self.segments else 0
        return TranscribeFile(
            generation=generation,
            request_id=self.request_id,
            lane=self.lane,
            path=str(self.path),
            options=self.options,
            base_sample=base,
            next_index=len(self.segments),
            prefix="".join(delta.text for delta in self.open_deltas),
        )

    def take(self, event: Delta | SegmentDone | FileDone) -> None:
        """Keep what the worker has done. New words are progress as well as a whole segment is: a worker that died before
        either of them died of something else."""
        match event:
            case Delta():
                self.open_deltas.append(event)
                self.suspect, self.crashes = False, 0
            case SegmentDone():
                self.segments.append(event)
                self.open_deltas = []
                self.suspect, self.crashes = False, 0
            case FileDone(timings=timings):
                self.timings = timings
                self.done = event
        self._news.set()

    def fail(self, error: NapscribeError) -> None:
        if not self.ended:
            self.error = error
            self._news.set()

    async def result(self) -> FileDone:
        """Wait for the end. Raises the job's error."""
        while not self.ended:
            await self._next_news()
        if self.error is not None:
            raise self.error
        assert self.done is not None
        return self.done

    async def progress(self) -> AsyncIterator[Delta | SegmentDone]:
        """What is new, in order: words of the open segment, then the segment itself. Raises the job's error."""
        seen, words = 0, 0
        while True:
            while seen < len(self.segments):
                yield self.segments[seen]
                seen, words = seen + 1, 0
            while seen == len(self.segments) and words < len(self.open_deltas):
                words += 1
                yield self.open_deltas[words - 1]
            if seen < len(self.segments):
                continue
            if self.error is not None:
                raise self.error
            if self.done is not None:
                return
            await self._next_news()

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()
