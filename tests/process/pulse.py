"""``python -m tests.process.pulse HOST PORT``: asks ``/health`` again and again until its input ends, then prints the
milliseconds that each answer took. A process of its own, so that it does not share an interpreter with a test that works."""

from __future__ import annotations

import http.client
import select
import sys
import time

PAUSE_SECONDS = 0.01


def main() -> None:
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=30)
    took: list[float] = []
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        began = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        took.append((time.perf_counter() - began) * 1e3)
    connection.close()
    print("\n".join(f"{ms:.3f}" for ms in took))


if __name__ == "__main__":
    main()
