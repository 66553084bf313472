"""A gateway that is the first process of a container inherits a worker's children and buries them."""

from __future__ import annotations

import subprocess
import sys

import pytest

INHERITING = """
import asyncio, ctypes, os, sys
from gateway.life.process import WorkerProcess

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

async def main():
    stranger = await asyncio.create_subprocess_exec("sleep", "0.01", start_new_session=True)
    worker = await WorkerProcess.spawn([sys.executable, "-c", sys.argv[1]], os.environ, [])
    print(await worker.wait(), list(worker.tail))
    try:
        os.waitid(os.P_PGID, worker.pid, os.WEXITED | os.WNOHANG)
        print("orphans")
    except ChildProcessError:
        print("none")
    print(await stranger.wait())

asyncio.run(main())
"""


CHILDREN = "for _ in range(3): subprocess.Popen(['sleep', '60'])"
STRAY = "subprocess.Popen(['sleep', '9'], start_new_session=True)"
"""Beyond the group, so nobody ends it, and it holds the worker's stderr open."""
SAYS = "os.write(2, b'last words')"
LEAVES = "os._exit(0)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("forks", "leaves", "how"),
    [(CHILDREN, LEAVES, "exit 0"), (CHILDREN, KILLED, "SIGKILL"), (STRAY, KILLED, "SIGKILL")],
)
def test_what_a_worker_leaves_behind_holds_nothing_up_and_is_reaped(forks: str, leaves: str, how: str) -> None:
    command = [sys.executable, "-c", INHERITING, f"import os, signal, subprocess\n{forks}\n{SAYS}\n{leaves}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=8, check=True)
    assert done.stdout.split("\n")[:3] == [f"{how} ['last words']", "none", "0"]
