"""A worker without a model: a real process that speaks the real protocol, with switches for bad behaviour.

A "recording" is any file; every ``--segment-bytes`` of it are one segment of one second whose text is ``w<index>``. So
what comes out shows what was done, twice, or not at all, over any number of generations. Each segment begun is appended
to ``--trace`` as ``<generation> <request> <index>``.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import zmq

from shared.codec import decode_command, encode
from shared.errors import ProtocolError
from shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Capabilities,
    Command,
    Event,
    Failed,
    Fatal,
    FileDone,
    FileTimings,
    Hello,
    Lane,
    Ping,
    Pong,
    Progress,
    Ready,
    SegmentDone,
    Stop,
    TranscribeFile,
)
from shared.pcm import SAMPLE_RATE
from shared.recorder import Recorder, Slot
from shared.streams import AudioBatch, CloseStream, OpenStream, StreamDone, StreamProgress
from worker.guard import die_with

PROGRESS_BYTES = 8_000
"""Live audio between two acknowledgements: a quarter of a second at 16 kHz."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--data", "--control", "--model"):
        parser.add_argument(name, required=True)
    for name in ("--generation", "--parent", "--recorder"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--threads", "--cpus", "--gpu-memory-mb", "--aligner", "--live-model", "--debug-timing"):
        parser.add_argument(name, default="")
    parser.add_argument("--trace", default="")
    parser.add_argument("--segment-bytes", type=int, default=1000)
    parser.add_argument("--segment-s", type=float, default=0.0, help="time that a segment takes")
    parser.add_argument("--credits", type=int, default=2)
    parser.add_argument("--max-step-s", type=float, default=30.0)
    parser.add_argument("--until", type=int, default=10**9, help="misbehave up to this generation only")
    parser.add_argument("--slow-load", type=float, default=0.0, help="seconds, with signs of progress")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--fail-load", action="store_true")
    parser.add_argument("--die-on-load", action="store_true")
    parser.add_argument("--ignore-stop", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--die-after", type=int, default=-1, help="SIGKILL itself while it does this segment index")
    parser.add_argument("--poison", default="", help="SIGKILL itself when the prompt holds this")
    parser.add_argument("--stall-after", type=int, default=-1, help="hang in a step, answering pings")
    parser.add_argument("--freeze-after", type=int, default=-1, help="SIGSTOP itself")
    parser.add_argument("--garbage", action="store_true")
    parser.add_argument("--wrong-version", action="store_true")
    parser.add_argument("--fork-child", default="", help="start a child that ignores us; its pid goes to this file")
    parser.add_argument("--flood-stderr", type=int, default=0, help="megabytes")
    return parser.parse_args()


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.bad = options.generation <= options.until
        self.recorder = Recorder(options.recorder)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.data = self._connect(options.data)
        self.control = self._connect(options.control)
        self.jobs: collections.OrderedDict[str, tuple[TranscribeFile, int, int]] = collections.OrderedDict()
        self.step_began = 0
        self.streams: dict[str, list[int]] = {}
        """Live streams: bytes received, and bytes acknowledged."""

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"generation-%d" % self.options.generation)
        socket.connect(address)
        return socket

    def send(self, event: Event) -> None:
        self.data.send(encode(event))

    def _flush(self) -> None:
        """Last words: returns when the kernel has them, after which nothing can be said."""
        self.data.close(linger=5_000)
        self.control.close(linger=0)
        self.context.term()

    def run(self) -> None:
        options, generation = self.options, self.options.generation
        self.send(Hello(generation, PROTOCOL_VERSION + (self.bad and options.wrong_version), os.getpid()))
        if self.bad and options.garbage:
            self.data.send_multipart([b"\xc1not msgpack at all"])
        if self.bad and options.flood_stderr:
            for _ in range(options.flood_stderr):
                sys.stderr.write(("x" * 127 + "\n") * 8192)
        if options.fork_child:
            child = subprocess.Popen([sys.executable, "-c", "import signal,time\nsignal.pause()"])
            Path(options.fork_child).write_text(str(child.pid))
        self._load()
        capabilities = Capabilities(
            "fake", "fake", ("en",), 1000, 1, False, False, False, "estimated", 10.0, options.max_step_s
        )
        self.send(Ready(generation, capabilities, {**dict.fromkeys(Lane, options.credits), Lane.LIVE: 1000}))
        while True:
            self._read(0 if self.jobs else 1000)
            if self.jobs:
                self._segment()

    def _load(self) -> None:
        options, generation = self.options, self.options.generation
        if self.bad and options.fail_load:
            self.send(Fatal(generation, "model_load_failed", "No such model.", "Choose another one."))
            self._flush()
            sys.exit(3)
        if self.bad and options.die_on_load:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + options.slow_load
        while time.monotonic() < deadline:
            self.send(Progress(generation, "loading", 1 - (deadline - time.monotonic()) / options.slow_load))
            time.sleep(0.05)
        while self.bad and options.never_ready:
            self._read(1000)

    def _read(self, timeout_ms: int) -> None:
        poller = zmq.Poller()
        poller.register(self.data, zmq.POLLIN)
        poller.register(self.control, zmq.POLLIN)
        for socket, _ in poller.poll(timeout_ms):
            while True:
                try:
                    command, payload = decode_command(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                except ProtocolError:
                    continue
                self._handle(command, len(payload))

    def _handle(self, command: Command, size: int = 0) -> None:
        match command:
            case OpenStream(request_id=request_id):
                self.streams[request_id] = [0, 0]
            case AudioBatch(frames=frames):
                for request_id, _, length in frames:
                    self._hear(request_id, length)
            case CloseStream(request_id=request_id):
                received, _ = self.streams.pop(request_id, (0, 0))
                self.send(StreamDone(command.generation, request_id, received // 2))
            case TranscribeFile():
                try:
                    total = max(1, -(-Path(command.path).stat().st_size // self.options.segment_bytes))
                except FileNotFoundError:  # the caller left, and its file with it
                    self.send(Failed(command.generation, command.request_id, "cancelled", "The caller left."))
                    return
                if command.next_index >= total:  # an earlier worker died between its last segment and its last word
                    self._done(command.request_id, total)
                else:
                    self.jobs[command.request_id] = (command, command.next_index, total)
            case Cancel(request_id=request_id):
                if self.jobs.pop(request_id, None) is not None:
                    self.send(Failed(command.generation, request_id, "cancelled", "The caller left."))
            case Ping(sequence=sequence):
                age = time.monotonic_ns() - self.step_began if self.step_began else 0
                self.control.send(encode(Pong(command.generation, sequence, age, 0)))
            case Stop() if not self.options.ignore_stop:
                sys.exit(0)

    def _hear(self, request_id: str, size: int) -> None:
        """Counts, no more: every byte of a stream shows in the length that ``StreamDone`` names (s16le is assumed)."""
        counts = self.streams[request_id]
        counts[0] += size
        if counts[0] - counts[1] >= PROGRESS_BYTES:
            counts[1] = counts[0]
            self.send(StreamProgress(self.options.generation, request_id, counts[0], counts[0] // 2))

    def _segment(self) -> None:
        options = self.options
        request_id = min(self.jobs, key=lambda name: self.jobs[name][0].lane)
        command, index, total = self.jobs[request_id]
        self.recorder.begin(Slot.ENGINE, [(request_id, index)])
        self.step_began = time.monotonic_ns()
        if options.trace:
            with Path(options.trace).open("a") as trace:
                trace.write(f"{options.generation} {request_id} {index}\n")
        if self.bad and (index == options.die_after or (options.poison and options.poison in command.options.prompt)):
            self._flush()  # what was sent before is on its way; only the segment in hand is lost
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bad and index == options.freeze_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.bad and index == options.stall_after:
            self._read(20)
        deadline = time.monotonic() + options.segment_s
        while time.monotonic() < deadline:
            self._read(10)
        self.recorder.end(Slot.ENGINE)
        self.step_began = 0
        if request_id not in self.jobs:
            return
        start = index * SAMPLE_RATE
        end = start + SAMPLE_RATE
        self.send(SegmentDone(options.generation, request_id, index, start, end - 100, end, f"w{index}", language="en"))
        if index + 1 < total:
            self.jobs[request_id] = (command, index + 1, total)
            return
        del self.jobs[request_id]
        self._done(request_id, total)

    def _done(self, request_id: str, total: int) -> None:
        self.send(FileDone(self.options.generation, request_id, total * SAMPLE_RATE, "en", FileTimings(1, 1, 1)))


def main() -> None:
    options = parse()
    die_with(options.parent)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Worker(options).run()


if __name__ == "__main__":
    main()
