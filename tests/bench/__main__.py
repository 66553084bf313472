"""``make bench``: measure, print, and write ``docs/benchmarks.md``. Exit code 1 if a promised figure is missed.

``python -m tests.bench idle cold`` measures only those, and leaves the document as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import calls, cold_start, idle_memory, lanes, live_load, throughput
from tests.bench.figures import Figure, table
from tests.server import ROOT

BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "idle": idle_memory.measure,
    "cold": cold_start.measure,
    "speed": throughput.measure,
    "lanes": lanes.measure,
    "live": live_load.measure,
    "calls": calls.measure,
}
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- written by make bench: begin -->", "<!-- written by make bench: end -->"
VERSIONS = ("granian", "starlette", "pyzmq", "msgspec", "onnxruntime", "moonshine-voice", "av", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure what Napscribe promises.")
    parser.add_argument("names", nargs="*", choices=[[], *BENCHES], help="default: all of them")
    names = parser.parse_args().names or list(BENCHES)
    before = _load()
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", flush=True)
        figures += BENCHES[name]()
    conditions = _conditions(before)
    print(f"\n{conditions}\n\n{table(figures)}\n")
    if names == list(BENCHES):
        _write(f"{conditions}\n\n{table(figures)}")
        print(f"Written to {DOCUMENT.relative_to(ROOT)}.")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        print(f"MISSED: {figure.what}", file=sys.stderr)
    return 1 if missed else 0


def _conditions(load_before: str) -> str:
    """The machine, the day and the versions, as a sentence or two."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    kernel = f"Linux {platform.release()}"
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {_cpu()}, {len(os.sched_getaffinity(0))} cores, {kernel}, "
        f"Python {platform.python_version()}; load average {load_before} before and {_load()} after. {versions}."
    )


def _cpu() -> str:
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _write(text: str) -> None:
    """Replace what stands between the two marks."""
    document = DOCUMENT.read_text()
    head, tail = document.partition(BEGIN)[0], document.partition(END)[2]
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
