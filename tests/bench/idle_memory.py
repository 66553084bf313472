"""What the gateway holds while its worker sleeps, after its first jobs: every process of the tree, ``smaps_rollup``.

Nothing asks the server anything between its last answer and the reading: a request brings pages back.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.bench.figures import Figure
from tests.bench.installation import Installation, private_installation
from tests.server import ROOT, Server

PRIVATE_MUST, PRIVATE_AIM = 22, 18
RESIDENT_MUST, RESIDENT_AIM = 34, 28
NOBODY = 65534
REST_SECONDS = 2.0
"""The gateway gives memory back half a second after its worker has gone."""
WATCH_SECONDS = 5.0
CLIP = ROOT / "tests" / "data" / "librivox-0880.wav"


def measure() -> Iterator[Figure]:
    with private_installation() as installation:
        yield from _idle(installation, "as root" if os.getuid() == 0 else "as this user")
        if os.getuid() == 0:
            installation.give_to(NOBODY)
            yield from _idle(installation, "unprivileged, owning its files")
        else:
            print("The figures of an unprivileged user are those of this one; run as root to see root's as well.")


def _idle(installation: Installation, who: str) -> Iterator[Figure]:
    with installation.serving(idle_seconds=0.2) as server:
        for fields in ({}, {"response_format": "srt"}, {"stream": "true"}, {"response_format": "verbose_json"}):
            server.transcribe(CLIP, **fields).raise_for_status()
        server.until(lambda: '"state":"stopped"' in server.log().rpartition('"event":"worker"')[2], "the worker leaves")
        time.sleep(REST_SECONDS)
        tree = list(_tree(server))
        private, resident = (sum(column) for column in zip(*map(_memory, tree), strict=True))
        before = _wakeups(tree)
        time.sleep(WATCH_SECONDS)
        woken = _wakeups(tree) - before
    note = f"{len(tree)} process" + ("es" if len(tree) > 1 else "")
    yield Figure(f"idle gateway, private, {who}", private, "MiB", PRIVATE_MUST, PRIVATE_AIM, note)
    yield Figure(f"idle gateway, RSS, {who}", resident, "MiB", RESIDENT_MUST, RESIDENT_AIM, note)
    yield Figure(f"idle gateway, wake-ups in {WATCH_SECONDS:g} s, {who}", woken, "", note="voluntary context switches")


def _tree(server: Server) -> Iterator[int]:
    """The server and all that descends from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # gone meanwhile
                continue
    family = {server.pid}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    yield from family


def _memory(pid: int) -> tuple[float, float]:
    """Private and resident MiB of a process."""
    rollup = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, amount = line.partition(":")
        rollup[name] = int(amount.split()[0]) / 1024
    return rollup["Private_Clean"] + rollup["Private_Dirty"], rollup["Rss"]


def _wakeups(tree: Iterable[int]) -> int:
    """How often any thread has gone to sleep so far: an idle process that wakes up keeps a processor from its rest."""
    texts = (status.read_text() for pid in tree for status in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(
        int(count) for text in texts for count in re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)
    )
