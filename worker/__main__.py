"""The worker process: ``python -P -m worker --data … --control … --generation N --parent PID --recorder FD --model M``.

Spawned by the gateway, never by hand. Exit codes: 0 asked to leave, 3 the model cannot be loaded (a ``Fatal`` event has
said why), anything else is a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shared import journal
from shared.cores import NEAR_GPU, parse_cores
from shared.devices import nvidia_there
from shared.errors import ModelLoadFailed, NapscribeError
from shared.messages import Capabilities, Fatal, Lane, Pong, Progress, Ready
from shared.recorder import Recorder
from worker.child import NoChild
from worker.cores import pin
from worker.guard import EXIT_BUG, die_with, die_with_any_thread
from worker.inbox import Bell, Inbox

if TYPE_CHECKING:
    from worker.audio.vad import SileroVad
    from worker.engines.base import Engine
    from worker.engines.registry import EngineOptions
    from worker.live.audio import LiveAudio
    from worker.live.ears_process import EarsProcess
    from worker.live.happenings import Arrival, Happening
    from worker.scheduler import Scheduler

    Ears = LiveAudio | EarsProcess

EXIT_LOAD_FAILED = 3
AT_EVERY_START = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Kinds of errors that come of what was loaded, and not of the machine's state."""
CALLS_BESIDE_EARS = 200
"""With an engine on a GPU, where the ears are no process of their own: the two share an interpreter (``docs/benchmarks.md``)."""
NEVER_ON_A_GPU = ("embedded", "scripted")
FILE_JOBS_AHEAD = 2
"""Batch jobs in the worker beyond those that the engine works on at once: their audio is decoded meanwhile."""


class WorkerProcess:
    """Puts the parts together; ``run`` is the scheduler's thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._generation: int = arguments.generation
        self._recorder = Recorder(arguments.recorder)
        self._bell = Bell()
        self._scheduler: Scheduler | None = None
        self._engine: Engine | None = None
        self._ears_ahead: EarsProcess | None = None
        """Started while the engine loads, where it looks as if they will be wanted."""
        self._audio_age: Callable[[], int] = lambda: 0
        self._inbox = Inbox(arguments.data, arguments.control, self._generation, self._bell, self._pong)

    def run(self) -> int:
        self._inbox.start()
        try:
            scheduler = self._load()
        except Exception as error:
            failure = load_failure(error, self._arguments.model)
            self._inbox.emit(Fatal(self._generation, failure.code, failure.message, failure.hint, failure.retryable))
            self._inbox.drain(2)
            return EXIT_LOAD_FAILED
        self._scheduler = scheduler
        while not scheduler.stopped:
            for command in self._inbox.take():
                scheduler.handle(command)
            if not scheduler.stopped and not scheduler.turn():
                self._bell.wait()
        return 0

    def _load(self) -> Scheduler:
        """Load the engine while the ears' libraries load beside it, then say ready. Raises ModelLoadFailed."""
        hearing = threading.Thread(target=self._prepare_hearing, name="import", daemon=True)
        hearing.start()
        from worker.engines import registry

        self._report("imported", 0.0)
        engine = registry.create(self._arguments.model, _engine_options(self._arguments, self._bell.ring))
        capabilities = engine.load(self._report)
        self._engine = engine
        if self._arguments.cpus == NEAR_GPU and capabilities.device in {"", "cpu"}:
            journal.log(
                "there is no GPU whose cores the worker could keep to", level="warning", setting="NAPSCRIBE_CPUS"
            )
        hearing.join()
        scheduler, capabilities = self._connect(engine, capabilities)
        # What it holds is known as soon as it is ready, not only at the first ping.
        self._inbox.emit(Pong(self._generation, 0, 0, 0, device_memory=engine.device_memory))
        self._inbox.emit(Ready(self._generation, capabilities, _credits(capabilities)))
        return scheduler

    def _prepare_hearing(self) -> None:
        """Decoders and ONNX Runtime take a third of a second to import, here and in a child. A failure shows where they are used."""
        with contextlib.suppress(Exception):
            if nvidia_there() and not self._arguments.model.startswith(NEVER_ON_A_GPU):
                self._ears_ahead = self._ears_process()
            importlib.import_module("worker.files.feeder")
            importlib.import_module("worker.live.audio")

    def _connect(self, engine: Engine, capabilities: Capabilities) -> tuple[Scheduler, Capabilities]:
        """Ears for files and for streams, and the scheduler between them and the engine; what all of them together can do. Raises
        ModelLoadFailed."""
        from worker.audio.vad import load_vad
        from worker.cores import usable_cores
        from worker.files.feeder import Feeder, audio_threads, read_ahead
        from worker.files.reader import FileReaders, Readers
        from worker.files.segments import SegmentPolicy
        from worker.scheduler import Scheduler

        vad = load_vad()
        policy = SegmentPolicy.up_to(capabilities.max_segment_s)
        ahead, threads = read_ahead(capabilities.max_batch), audio_threads(usable_cores())
        # Two batches: one in the engine, one that waits for it, whatever the number of files.
        most = 2 * capabilities.max_batch + ahead
        here, fast = FileReaders(vad, policy), capabilities.device not in {"", "cpu"}

        def child() -> Readers:
            from worker.files.reader_process import ReaderProcess

            return ReaderProcess(policy)

        feeder = Feeder(
            here, ahead, self._bell, self._recorder, own=child if fast else None, most=most, threads=threads
        )
        scheduler = Scheduler(engine, capabilities, self._generation, self._inbox.emit, feeder, self._recorder)
        scheduler.log_steps = bool(self._arguments.debug_timing)

        ears = self._ears(scheduler, vad, capabilities, apart=fast)
        if fast and not ears.apart:
            capabilities = replace(capabilities, max_live=min(capabilities.max_live, CALLS_BESIDE_EARS))
        scheduler.connect(ears.final_said)
        self._inbox.announce(scheduler.expect)
        self._inbox.hear(ears.give)
        self._audio_age = lambda: max(feeder.age_ns(), ears.age_ns())
        feeder.start()
        return scheduler, capabilities

    def _ears(self, scheduler: Scheduler, vad: SileroVad, capabilities: Capabilities, *, apart: bool) -> Ears:
        """They listen already. ``apart``: in a process of their own, if there can be one."""
        ahead = self._ears_ahead or (self._ears_process() if apart else None)
        if ahead is not None and apart:
            cores = tuple(os.sched_getaffinity(0))
            try:
                ahead.connect(
                    self._generation, capabilities, cores, self._inbox.emit_encoded, scheduler.tell, self._bell.ring
                )
            except NoChild as error:
                journal.log("live audio stays in the worker", level="warning", error=str(error))
            else:
                return ahead
        if ahead is not None:
            ahead.close()
        from worker.live.audio import LiveAudio

        def tell(request_id: str, happening: Happening, arrival: Arrival | None) -> None:
            scheduler.tell(request_id, happening, arrival)
            self._bell.ring()

        here = LiveAudio(self._generation, self._inbox.emit, tell, vad, capabilities, self._recorder)
        here.start()
        return here

    def _ears_process(self) -> EarsProcess:
        from worker.live.ears_process import EarsProcess

        return EarsProcess(self._arguments.recorder, died=lambda: os._exit(EXIT_BUG))

    def _report(self, phase: str, fraction: float) -> None:
        self._inbox.emit(Progress(self._generation, phase, fraction))

    def _pong(self, sequence: int) -> Pong:
        scheduler = self._scheduler
        if scheduler is None:
            return Pong(self._generation, sequence, 0, 0)
        return Pong(
            self._generation,
            sequence,
            step_age_ns=scheduler.step_age_ns(),
            audio_age_ns=self._audio_age(),
            preemptions=scheduler.preemptions,
            steps=scheduler.steps,
            queued=scheduler.queued(),
            device_memory=self._engine.device_memory if self._engine else 0,
        )


def load_failure(error: Exception, model: str) -> NapscribeError:
    """What is told of an error while loading. One that nobody has foreseen, in a strange checkpoint for instance, would happen again at
    every start. Raises what the system or a device may say once and not again: then another start is tried."""
    if isinstance(error, NapscribeError):
        return error
    if not isinstance(error, AT_EVERY_START):
        raise error
    traceback.print_exception(error)
    return ModelLoadFailed(
        f"Loading {model} failed: {type(error).__name__}: {str(error)[:300]}",
        hint="The server's log shows where. A checkpoint that is not a published one may have a configuration that does not fit.",
    )


def _engine_options(arguments: argparse.Namespace, wake: Callable[[], None]) -> EngineOptions:
    from worker.engines.registry import EngineOptions

    return EngineOptions(
        threads=arguments.threads,
        near_gpu=arguments.cpus == NEAR_GPU,
        gpu_memory_mb=arguments.gpu_memory_mb,
        aligner=arguments.aligner,
        live_model=arguments.live_model,
        wake=wake,
    )


def _credits(capabilities: Capabilities) -> dict[Lane, int]:
    files = capabilities.max_batch + FILE_JOBS_AHEAD
    return {Lane.LIVE: capabilities.max_live, Lane.INTERACTIVE: files, Lane.BATCH: files}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="worker", description="Spawned by the Napscribe gateway.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--recorder", type=int, required=True, help="inherited descriptor")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--gpu-memory-mb", type=int, default=0)
    parser.add_argument("--aligner", default="")
    parser.add_argument("--live-model", default="")
    parser.add_argument("--debug-timing", type=int, default=0)
    return parser.parse_args(argv)


def main() -> int:
    arguments = _parse(sys.argv[1:])
    die_with(arguments.parent)
    if arguments.cpus not in {"", NEAR_GPU}:
        pin(parse_cores(arguments.cpus))  # before there are threads, and libraries that count cores
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    journal.bind(process="worker", generation=arguments.generation, pid=os.getpid())
    began = time.monotonic()
    die_with_any_thread()
    try:
        code = WorkerProcess(arguments).run()
    except BaseException:
        traceback.print_exc()
        code = EXIT_BUG
    journal.log("leaving", code=code, lived_s=round(time.monotonic() - began, 3))
    # Native libraries may hang in their destructors; nothing of ours is left to be saved.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
