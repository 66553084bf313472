"""``napscribe`` with the blocking-call detector on: a call that would block the gateway's loop raises instead.

``python -P -m tests.blocking serve`` is what the tests start; people start the console script.
"""

from __future__ import annotations

import sys

from blockbuster import BlockBuster

from gateway.cli import main

WATCHED = ["gateway", "shared"]


def detector() -> BlockBuster:
    """Not yet active. Watches calls made by our modules on a running loop; procfs never waits for a device."""
    watch = BlockBuster(scanned_modules=WATCHED)
    for call in ("io.BufferedReader.read", "io.TextIOWrapper.read", "os.stat"):
        watch.functions[call].can_block_in("gateway/life/process.py", "resident_bytes")
        watch.functions[call].can_block_in("gateway/reclaim.py", "reclaim")
    for call in ("os.getcwd", "os.stat"):
        watch.functions[call].can_block_in("gateway/app.py", "serve")  # Granian's constructor, before it listens
    watch.functions["io.TextIOWrapper.write"].can_block_in("shared/journal.py", "log")
    watch.functions["io.TextIOWrapper.write"].can_block_in("gateway/life/process.py", "_forward")
    return watch


if __name__ == "__main__":
    detector().activate()
    sys.exit(main())
