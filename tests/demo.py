"""``make demo``: a real server, a human recording, its transcript, and the worker that is there only for the while."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from gateway.life.process import resident_bytes
from tests.server import Server, serving

RECORDING = Path(__file__).parent / "data" / "jfk.wav"
IDLE_SECONDS = 0.5
MIB = 1024 * 1024


class Watch:
    """Prints every state of the worker when the server logs it, with what the process table says of it then."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began = time.time()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.states: list[str] = []

    def __enter__(self) -> Watch:
        self._print(self._began, "stopped", "no process, no memory")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self._leave.wait(0.01):
            lines = [line for line in self._server.log().splitlines() if line.startswith('{"time"')]
            for entry in map(json.loads, lines[seen:]):
                if entry["event"] == "worker":
                    self.states.append(entry["state"])
                    self._print(entry["time"], entry["state"], self._about(entry))
            seen = len(lines)

    def _about(self, entry: dict[str, Any]) -> str:
        facts = [f"generation {entry['about']}"]
        if entry["state"] == "ready":
            worker = self._server.worker
            facts += [f"pid {worker['pid']}", f"{worker['resident_bytes'] / MIB:.0f} MiB"]
        elif entry["state"] == "stopped":
            facts.append("no process, no memory")
        return ", ".join([*facts, entry["reason"]] if entry["reason"] else facts)

    def _print(self, at: float, state: str, about: str) -> None:
        print(f"  {at - self._began:5.2f} s  worker {state:9} {about}", flush=True)


def show(answer: httpx.Response) -> None:
    """Transcript and stages of an answer."""
    body = answer.json()
    print(f"\n  {body['duration']:.0f} s of speech in {RECORDING.name}:\n")
    for segment in body["segments"]:
        print(f"    {segment['start']:5.2f} - {segment['end']:5.2f}   {segment['text'].strip()}")
    stages = [stage.partition(";dur=") for stage in answer.headers["server-timing"].split(", ")]
    print("\n  milliseconds: " + ", ".join(f"{name} {float(ms):.0f}" for name, _, ms in stages) + "\n", flush=True)


def resting_mib(pid: int, seconds: float = 1.0) -> float:
    """Resident memory of a process, the least within some seconds: the gateway gives back what it does not need, soon
    after its worker has gone. Read from the process table, since a request would wake it up."""
    least, deadline = math.inf, time.monotonic() + seconds
    while time.monotonic() < deadline:
        least = min(least, resident_bytes(pid) / MIB)
        time.sleep(0.02)
    return least


def main() -> int:
    print("Starting a server; its worker is not there until somebody needs it.\n", flush=True)
    with serving(script=True, idle_seconds=IDLE_SECONDS) as server:
        with Watch(server) as watch:
            answer = server.transcribe(RECORDING, response_format="verbose_json")
            if answer.is_error:
                print(f"The server refused: {answer.text}\n{server.log()}", file=sys.stderr)
                return 1
            show(answer)
            server.until(lambda: watch.states[-1:] == ["stopped"], "the worker leaves")
        said = bool(answer.json()["text"].strip())
        resident = resting_mib(server.pid)
        code = server.stop()
    print(f"\nThe gateway alone: {resident:.0f} MiB. Stopped, exit code {code}. Now `make run`, and send your own.")
    return code or int(not said)


if __name__ == "__main__":
    sys.exit(main())
