"""All live streams: who has a worker, who waits for one, who sleeps.

A stream holds a lease from its first moment until it is parked or over. It is parked when no audio has come for the idle
time and no utterance is open; new audio wakes it, and the worker with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from gateway.latency import LatencyLog
from gateway.life.channel import Channel
from gateway.life.supervisor import Lease, Supervisor
from gateway.life.vitals import Worker
from gateway.streams.live import LiveStream
from shared.errors import Busy, NapscribeError, TooManyStreams, WorkerCrashed, from_code
from shared.journal import log
from shared.languages import require_spoken
from shared.messages import Cancel, Failed, Lane
from shared.streams import Parked, StreamDone, StreamEvent, StreamOptions, UtteranceFinal

MAX_STREAMS = 1024
"""Open streams, parked ones included, whatever the engine can do."""
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Audio of all streams together that is kept for replay; looked at every second. 200 calls of 16 kHz PCM may wait 40 s for a
worker within it."""
MAX_CRASHES = 6
"""Of workers that had the stream in hand, none of which came further than those before. A file has two: a call that is lost cannot be
sent again, so five kills from outside must not end one, whenever they strike."""
SWEEP_SECONDS = 1.0


class Hub:
    """Listens to the supervisor and the channel; all on the loop."""

    def __init__(
        self,
        channel: Channel,
        idle_seconds: float,
        latency: LatencyLog | None = None,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._channel = channel
        self._idle_seconds = idle_seconds
        self._latency = latency
        self._max_held_bytes = max_held_bytes
        self._streams: dict[str, LiveStream] = {}
        self._leases: dict[str, Lease] = {}
        self._worker: Worker | None = None
        self._accepting = False
        self._max_live = 0
        """As the last worker said; 0 before there was one."""
        self._sweeper: asyncio.TimerHandle | None = None
        self.supervisor: Supervisor
        """Set once by the composition root: the two know each other."""

    def open(self, stream_id: str, options: StreamOptions) -> LiveStream:
        """A new stream; wakes the worker. Raises BadRequest for a language that the model does not know, and TooManyStreams: at
        the handshake rather than later, so those that are parked keep their seats."""
        require_spoken(options.language, self.languages)
        limit = self._max_live or MAX_STREAMS
        if len(self._streams) >= min(MAX_STREAMS, limit):
            raise _too_many(limit)
        stream = LiveStream(stream_id, options, self._changed, self._channel.audio)
        self._streams[stream_id] = stream
        self._leases[stream_id] = self.supervisor.lease()
        self._begin(stream)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        return stream

    @property
    def languages(self) -> tuple[str, ...]:
        """Of the model; empty while nobody knows."""
        return self.supervisor.languages

    def close(self, stream: LiveStream) -> None:
        """The dialect is done with it, for whatever reason."""
        if not stream.ended:
            self._cancel(stream)
        self._forget(stream)

    def report(self) -> dict[str, int]:
        """Open streams, those with a worker, and audio held for replay."""
        return {
            "open": len(self._streams),
            "active": sum(1 for stream in self._streams.values() if stream.generation),
            "parked": len(self._streams) - len(self._leases),
            "held_bytes": sum(stream.replay.held_bytes for stream in self._streams.values()),
        }

    # ------------------------------------------------------------ what the supervisor says

    def worker_ready(self, worker: Worker) -> None:
        self._worker, self._accepting = worker, True
        self._max_live = worker.credits.get(Lane.LIVE, 0)
        for number, stream in enumerate([s for s in self._streams.values() if s.id in self._leases]):
            if number < self._max_live:
                self._begin(stream)
            else:
                stream.fail(_too_many(self._max_live))

    def worker_stopping(self) -> None:
        self._accepting = False

    def worker_lost(self, generation: int, *, crashed: bool, reason: str) -> None:
        self._worker, self._accepting = None, False
        suspects = self.supervisor.suspects(generation) if crashed else {}
        for stream in list(self._streams.values()):
            if stream.generation != generation:
                continue
            stream.lost()
            stream.restarts += 1
            if stream.id in suspects:
                self._blame(stream, reason)

    def refuse_all(self, error: NapscribeError) -> None:
        for stream in list(self._streams.values()):
            if stream.id in self._leases:
                stream.fail(error)

    # ------------------------------------------------------------ what the worker says

    def handle(self, event: StreamEvent | Failed) -> bool:
        """An event of a stream; False if it is of none of ours."""
        stream = self._streams.get(event.request_id)
        if stream is None or event.generation != stream.generation:
            return stream is not None
        match event:
            case Failed():
                stream.lost()
                stream.fail(from_code(event.code, event.message, hint=event.hint, param=event.param))
            case Parked():
                stream.take(event)
                self._sleep(stream)
            case StreamDone():
                self.supervisor.settled(event.generation)
                stream.take(event)
            case _:
                if isinstance(event, UtteranceFinal) and self._latency is not None:
                    self._latency.utterance(event)
                stream.take(event)
                self._pump(stream)
        return True

    # ------------------------------------------------------------ inside

    def _begin(self, stream: LiveStream) -> None:
        """Give the stream to the worker, if there is one."""
        worker = self._worker
        if worker is None or not self._accepting or stream.generation or stream.ended:
            return
        try:
            self._channel.send(stream.opening(worker.generation))
        except Busy as error:
            log("stream not opened", level="warning", request_id=stream.id, error=error.code)
            stream.lost()
            return
        self._pump(stream)

    def _changed(self, stream: LiveStream) -> None:
        if stream.ended:
            if stream.error is not None:
                self._cancel(stream)  # it ended here, not in the worker
            self._forget(stream)
            return
        if stream.id not in self._leases and stream.id in self._streams:
            if not stream.answer_asleep():
                self._wake(stream)
            return
        if stream.generation:
            self._pump(stream)

    def _cancel(self, stream: LiveStream) -> None:
        """The worker that has it need not go on."""
        if stream.generation:
            with contextlib.suppress(NapscribeError):
                self._channel.control(Cancel(stream.generation, stream.id))

    def _pump(self, stream: LiveStream) -> None:
        """Send what flow control lets go."""
        outgoing = stream.outgoing
        while stream.generation and not stream.ended and (entry := outgoing()) is not None:
            if entry.command is None:
                self._channel.audio(stream.generation, stream.id, entry.arrived_ns, entry.data)
                continue
            try:
                self._channel.send(stream.addressed(entry.command))
            except Busy:
                return  # it is being lost or does not read: the supervisor will say so, and a rewind sends this again

    def _wake(self, stream: LiveStream) -> None:
        if self._max_live and len(self._leases) >= self._max_live:
            stream.fail(_too_many(self._max_live))
            return
        self._leases[stream.id] = self.supervisor.lease()
        self._begin(stream)

    def _sleep(self, stream: LiveStream) -> None:
        """It is parked. Audio that came meanwhile wakes it at once."""
        lease = self._leases.pop(stream.id, None)
        if stream.replay.pending:
            self._wake(stream)
        if lease is not None:
            lease.release()

    def _forget(self, stream: LiveStream) -> None:
        self._streams.pop(stream.id, None)
        lease = self._leases.pop(stream.id, None)
        if lease is not None:
            lease.release()

    def _blame(self, stream: LiveStream, reason: str) -> None:
        stream.crashes += 1
        if stream.crashes >= MAX_CRASHES:
            stream.fail(
                WorkerCrashed(
                    f"This stream ended the worker {stream.crashes} times: {reason}.",
                    hint="The others went on. Please report what was sent if you can share it.",
                )
            )

    def _sweep(self) -> None:
        """Park the silent, and keep the total of held audio in bounds. Runs only while there are streams."""
        self._sweeper = None
        now = time.monotonic()
        for stream in list(self._streams.values()):
            silent = now - stream.last_audio > self._idle_seconds
            if silent and stream.generation and not stream.utterance_open and not stream.closing:
                with contextlib.suppress(NapscribeError):
                    self._channel.send(stream.park())
        self._bound_held()
        if self._streams:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _bound_held(self) -> None:
        """Those that hold most go first, until the others have room: memory is bounded however many streams wait."""
        held = sum(stream.replay.held_bytes for stream in self._streams.values())
        if held <= self._max_held_bytes:
            return
        for stream in sorted(self._streams.values(), key=lambda stream: stream.replay.held_bytes, reverse=True):
            log("stream dropped", level="warning", request_id=stream.id, held_bytes=stream.replay.held_bytes)
            held -= stream.replay.held_bytes
            stream.fail(
                TooManyStreams(
                    "All streams together hold more audio than is kept for a worker.",
                    hint="Open it again when the worker has caught up.",
                    retry_after=5,
                )
            )
            if held <= self._max_held_bytes:
                return


def _too_many(limit: int) -> TooManyStreams:
    return TooManyStreams(
        f"{limit} live streams are open, which is what the engine can keep up with.",
        hint="Close one first.",
        retry_after=5,
    )
