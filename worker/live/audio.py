"""The ears of the worker: one thread that decodes live audio, asks the voice activity model about all streams at once,
and tells the scheduler what begins, goes on and ends.

Audio comes straight from the socket thread; it is decoded once, and the arrays cut from it go to the engine as they are (beside a GPU
from another process: ``worker.live.ears_process``).
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from shared.codec import Buffer
from shared.errors import BadRequest, EngineFailed, NapscribeError
from shared.journal import log
from shared.languages import require_spoken
from shared.messages import Capabilities, Command, Event
from shared.recorder import Recorder, Slot
from shared.streams import (
    AudioBatch,
    ClearAudio,
    CloseStream,
    EndUtterance,
    OpenStream,
    Parked,
    ParkStream,
    SpeechStarted,
    SpeechStopped,
    StreamAudio,
    StreamOptions,
    StreamProgress,
    UpdateStream,
)
from worker.audio.vad import FRAME, SileroVad
from worker.live.decode import CONTAINER, live_decoder
from worker.live.ear import Ear
from worker.live.endpointing import Action, Begin, End, Endpointer
from worker.live.happenings import Answer, Arrival, Cleared, Closed, Happening, Opened, Released, Updated

LATE_NS = 500_000_000
"""A stall that is seen so much too late was seen by a process that stood still: audio may be waiting in its socket …"""
GRACE_NS = 1_000_000_000
"""… and has so long to be read."""

Tell = Callable[[str, Happening, "Arrival | None"], None]


class LiveAudio:
    """The thread. ``give`` may be called from any other; what happens is told through ``tell`` on this one."""

    apart = False
    """Whether it is another process that listens."""

    def __init__(
        self,
        generation: int,
        emit: Callable[[Event], None],
        tell: Tell,
        vad: SileroVad,
        capabilities: Capabilities,
        recorder: Recorder,
        turned: Callable[[int], None] = lambda _taken: None,
    ) -> None:
        """``turned``: called on this thread when it has done what there was to do, with the number of commands it has taken."""
        self._generation = generation
        self._emit = emit
        self._tell = tell
        self._vad = vad
        self._capabilities = capabilities
        self._recorder = recorder
        self._turned = turned
        self._taken = 0
        self._inbox: collections.deque[tuple[Command, Buffer]] = collections.deque()
        self._finals: collections.deque[tuple[str, int]] = collections.deque()
        self._wanted = threading.Event()
        self._ears: dict[str, Ear] = {}
        self._began_ns = 0
        self._thread = threading.Thread(target=self._run, name="live-audio", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, command: Command, payload: Buffer) -> None:
        """A command of a stream, or audio of many, in order of arrival."""
        self._inbox.append((command, payload))
        self._wanted.set()

    def final_said(self, request_id: str, utterance: int) -> None:
        """The scheduler has sent this utterance's final: its audio is needed no more. -1: the stream has ended there."""
        self._finals.append((request_id, utterance))
        if utterance < 0:
            self._wanted.set()

    def age_ns(self) -> int:
        """How long the running piece of work has been running; 0 when there is none."""
        began = self._began_ns
        return time.monotonic_ns() - began if began else 0

    # ------------------------------------------------------------ this thread

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._seconds_to_stall())
            self._wanted.clear()
            self._began_ns = time.monotonic_ns()
            try:
                self._turn()
                self._turned(self._taken)
            finally:
                self._began_ns = 0

    def _turn(self) -> None:
        self._settle_finals()
        while self._inbox:
            command, payload = self._inbox.popleft()
            self._taken += 1
            for part, audio in unpacked(command, payload):
                self._guarded(part, audio)
            if not self._inbox:
                self._listen()
        for ear in [ear for ear in self._ears.values() if ear.audio.encoding == CONTAINER]:
            self._fetch(ear)
        self._listen()
        self._end_stalled()
        for ear in list(self._ears.values()):
            self._end_announced(ear)
            self._progress(ear)

    def _seconds_to_stall(self) -> float | None:
        stalls = [at for ear in self._ears.values() if (at := ear.stalls_at_ns)]
        return max(0.0, (min(stalls) - time.monotonic_ns()) / 1e9) if stalls else None

    def _end_stalled(self) -> None:
        """Not while there is something to be heard: only then is silence the client's."""
        now = time.monotonic_ns()
        for ear in [ear for ear in self._ears.values() if 0 < ear.stalls_at_ns <= now]:
            if self._inbox:
                return
            if now - ear.stalls_at_ns > LATE_NS:
                ear.playout.expect_until(now + GRACE_NS)
                continue
            try:
                self._settle(ear)
            except NapscribeError as error:
                self._fail(ear.request_id, error)
                continue
            if ear.stalls_at_ns <= now:
                self._finish(ear, "stall")

    def _settle_finals(self) -> None:
        while self._finals:
            request_id, utterance = self._finals.popleft()
            ear = self._ears.get(request_id)
            if ear is None:
                continue
            if utterance < 0:
                self._forget(ear)
                continue
            while ear.owed and ear.owed[0][0] <= utterance:
                ear.owed.popleft()

    def _guarded(self, command: Command, payload: Buffer) -> None:
        """One bad stream fails alone."""
        request_id: str = getattr(command, "request_id", "")
        self._recorder.begin(Slot.LIVE, [(request_id, 0)])
        try:
            self._obey(command, payload)
        except NapscribeError as error:
            self._fail(request_id, error)
        except Exception as error:
            log("live audio failed", level="error", request_id=request_id, error=repr(error))
            self._fail(request_id, EngineFailed(f"Hearing the audio failed: {type(error).__name__}."))
        finally:
            self._recorder.end(Slot.LIVE)

    def _obey(self, command: Command, payload: Buffer) -> None:
        if isinstance(command, OpenStream):
            self._open(command)
            return
        ear = self._ears.get(getattr(command, "request_id", ""))
        if ear is None:
            return  # parked, failed or cancelled meanwhile: the gateway keeps the audio and says it again
        match command:
            case StreamAudio(arrived_ns=arrived_ns):
                ear.hear(bytes(payload), arrived_ns)
            case UpdateStream(options=options):
                self._update(ear, options)
            case EndUtterance(token=token):
                self._end_utterance(ear, token)
            case ClearAudio():
                self._settle(ear)
                number = ear.clear()
                self._tell(ear.request_id, Cleared(number, ear.endpointer.position), None)
            case ParkStream() if not ear.endpointer.unfinished and not ear.owed:
                self._park(ear)
            case CloseStream():
                self._close(ear)

    def _update(self, ear: Ear, options: StreamOptions) -> None:
        """The gateway lets another encoding through only before the first byte of a stream."""
        self._check(options)
        if options.audio != ear.audio and not ear.received_bytes:
            ear.decode_as(options.audio, self._wanted.set)
        ear.endpointer.rules = options.endpointing
        self._tell(ear.request_id, Updated(options), None)

    def _check(self, options: StreamOptions) -> None:
        require_spoken(options.language, self._capabilities.languages)
        if not 0 < options.endpointing.threshold < 1:
            raise BadRequest("The threshold of speech is a number between 0 and 1.", param="threshold")

    def _open(self, command: OpenStream) -> None:
        self._tell(command.request_id, Opened(command.options), None)
        self._check(command.options)
        endpointer = Endpointer(
            command.options.endpointing,
            self._capabilities.max_segment_s,
            command.base_sample,
            command.next_utterance,
            command.resumed,
            command.floor_sample,
        )
        audio, begin = command.options.audio, command.base_sample
        ear = Ear(command.request_id, audio, live_decoder(audio, self._wanted.set), endpointer, begin, begin)
        self._ears[command.request_id] = ear

    def _fetch(self, ear: Ear) -> None:
        """What a decoder with a thread of its own has finished since its bytes came."""
        try:
            ear.fetch()
        except NapscribeError as error:
            self._fail(ear.request_id, error)

    def _settle(self, ear: Ear) -> None:
        """All audio of the bytes so far is here, and listened to, before a command that comes after them is obeyed."""
        ear.settle()
        self._listen_to(ear)
        self._end_announced(ear)

    def _end_announced(self, ear: Ear) -> None:
        """What an earlier generation has ended ends as soon as all of its audio is here, though it falls into a frame that is not
        full yet: what is obeyed next finds it ended, as it was."""
        while 0 <= ear.endpointer.awaited_sample <= ear.decoded:
            awaited = ear.endpointer.awaited_sample
            self._fill_frame(ear)
            if ear.endpointer.awaited_sample == awaited:
                self._act(ear, ear.endpointer.finish("silence"))

    # ------------------------------------------------------------ voice activity

    def _listen(self) -> None:
        """Frame by frame, all streams that have one at once."""
        while ready := [ear for ear in self._ears.values() if len(ear.pending) >= FRAME]:
            if len(ready) == 1:
                self._listen_to(ready[0])
                return
            began = time.monotonic_ns()
            frames = np.stack([ear.pending[:FRAME] for ear in ready])
            probabilities = self._vad.probabilities([ear.state for ear in ready], frames)
            share = (time.monotonic_ns() - began) // len(ready)
            for ear, frame, probability in zip(ready, frames, probabilities, strict=True):
                ear.pending = ear.pending[FRAME:]
                ear.vad_ns += share
                self._act(ear, ear.endpointer.push(frame, float(probability)))

    def _listen_to(self, ear: Ear) -> None:
        """Everything that one stream has."""
        count = len(ear.pending) // FRAME
        if not count:
            return
        frames = ear.pending[: count * FRAME].reshape(count, FRAME)
        ear.pending = ear.pending[count * FRAME :]
        began = time.monotonic_ns()
        if count == 1:
            probabilities = self._vad.probabilities([ear.state], frames)
        else:
            probabilities = self._vad.sequence(ear.state, frames)
        ear.vad_ns += time.monotonic_ns() - began
        for frame, probability in zip(frames, probabilities, strict=True):
            self._act(ear, ear.endpointer.push(frame, float(probability)))

    def _act(self, ear: Ear, actions: list[Action]) -> None:
        for action in actions:
            arrival = None
            match action:
                case Begin(utterance=number, start_sample=start):
                    ear.owed.append((number, start))
                    if not action.announced:
                        self._emit(SpeechStarted(self._generation, ear.request_id, number, start))
                case End(utterance=number, end_sample=end, cause=cause):
                    now = time.monotonic_ns()
                    deciding = ear.arrived_ns(ear.endpointer.position) if cause in ("silence", "length") else now
                    arrival = Arrival(ear.arrived_ns(end), deciding or now, now, ear.vad_ns)
                    ear.vad_ns = 0
                    if not action.announced:
                        through = action.through_sample
                        self._emit(SpeechStopped(self._generation, ear.request_id, number, end, through, cause))
            self._tell(ear.request_id, action, arrival)

    # ------------------------------------------------------------ endings

    def _end_utterance(self, ear: Ear, token: int) -> None:
        """The last frame is filled up with silence: what was said in it belongs to the utterance."""
        self._settle(ear)
        number = ear.owed[-1][0] if ear.endpointer.open and ear.owed else -1
        self._finish(ear, "request")
        self._tell(ear.request_id, Answer(token, number), None)

    def _finish(self, ear: Ear, cause: str) -> None:
        self._fill_frame(ear)
        self._act(ear, ear.endpointer.finish(cause))

    def _fill_frame(self, ear: Ear) -> None:
        if len(ear.pending) and ear.endpointer.open:
            rest = np.zeros(FRAME, np.float32)
            rest[: len(ear.pending)] = ear.pending
            probability = self._vad.probabilities([ear.state.copy()], rest[None])
            frame, ear.pending = ear.pending, ear.pending[:0]
            self._act(ear, ear.endpointer.push(frame, float(probability[0]), last=True))

    def _close(self, ear: Ear) -> None:
        ear.flush()
        self._listen_to(ear)
        self._end_announced(ear)
        self._finish(ear, "close")
        self._tell(ear.request_id, Closed(ear.decoded), None)
        self._forget(ear)

    def _park(self, ear: Ear) -> None:
        self._emit(Parked(self._generation, ear.request_id, ear.needed_sample))
        self._tell(ear.request_id, Released(), None)
        self._forget(ear)

    def _fail(self, request_id: str, error: NapscribeError) -> None:
        ear = self._ears.get(request_id)
        if ear is not None:
            self._forget(ear)
        self._tell(request_id, error, None)

    def _forget(self, ear: Ear) -> None:
        ear.decoder.close()
        self._ears.pop(ear.request_id, None)

    def _progress(self, ear: Ear) -> None:
        if ear.acknowledge():
            self._emit(StreamProgress(self._generation, ear.request_id, ear.received_bytes, ear.needed_sample))


def unpacked(command: Command, payload: Buffer) -> Iterator[tuple[Command, Buffer]]:
    """A batch as the audio of its streams, one after the other."""
    if not isinstance(command, AudioBatch):
        yield command, payload
        return
    begin, whole = 0, memoryview(payload)
    for request_id, arrived_ns, size in command.frames:
        yield StreamAudio(command.generation, request_id, arrived_ns), whole[begin : begin + size]
        begin += size
