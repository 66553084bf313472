"""Calls through the whole server beside a GPU: how many of them one machine carries.

    python -m tests.gpu.bench_calls --streams 100 300 --out results.json

Human speech at its pace, 20 ms a frame, from clients in processes of their own. The model is the small trained one, which a GPU
does not feel, so the figures are those of everything around it: gateway, voice activity, endpointing, and the host's work for
each hypothesis, all of which are the same with a large one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.bench.calls import Call, calls
from tests.bench.figures import percentile
from tests.process.test_qwen3 import TINY
from tests.server import Server, serving

STREAMS = (1, 50, 100, 200, 300)
UTTERANCES = 4
SPREAD_SECONDS = 4.0
STREAMS_A_CLIENT = 50


def talk(port: int, streams: int) -> list[Call]:
    """What a process of clients does."""
    return asyncio.run(calls(port, streams, UTTERANCES, SPREAD_SECONDS))


def cores(processes: Sequence[psutil.Process], seconds: float) -> list[float]:
    """How many cores each keeps busy for some seconds."""

    def spent() -> list[float]:
        return [times.user + times.system for times in (process.cpu_times() for process in processes)]

    before = spent()
    time.sleep(seconds)
    return [(after - earlier) / seconds for earlier, after in zip(before, spent(), strict=True)]


def run(server: Server, streams: int) -> dict[str, Any]:
    sizes = [min(STREAMS_A_CLIENT, streams - begin) for begin in range(0, streams, STREAMS_A_CLIENT)]
    with ProcessPoolExecutor(len(sizes), mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(talk, server.port, size) for size in sizes]
        time.sleep(2 * SPREAD_SECONDS)
        worker = psutil.Process(server.worker_pid())
        busy = cores([psutil.Process(server.pid), worker, *worker.children()], 5.0)
        done = [call for future in pending for call in future.result()]
    finals, partials, firsts = (
        [value * 1e3 for call in done for value in getattr(call, kind)] for kind in ("finals", "partials", "firsts")
    )
    return {
        "streams": streams,
        "finals": len(finals),
        "final p50 ms": statistics.median(finals),
        "final p95 ms": percentile(finals, 95),
        "partial behind p50 ms": statistics.median(partials),
        "partial behind p95 ms": percentile(partials, 95),
        "first partial p50 ms": statistics.median(firsts),
        "first partial p95 ms": percentile(firsts, 95),
        "partials": len(partials),
        "gateway, cores": busy[0],
        "worker, cores": busy[1],
        "its children, cores": sum(busy[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with serving(script=True, model=options.model, idle_seconds=3600, aligner="none") as server:
        server.http.timeout = 300
        server.http.post(f"/api/ps/{server.ps()['model']}").raise_for_status()
        for streams in options.streams:
            results.append(run(server, streams))
            print({key: round(value, 2) for key, value in results[-1].items()}, flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
