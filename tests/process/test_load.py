"""Many at once, no room, and callers who leave: everybody gets an answer, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.process.fakes import FAKE, GUARD, recording, running, segments_text, uploads, waiting
from tests.server import Server, serving

DOOR = "/v1/audio/transcriptions"

# ---------------------------------------------------------------- many at once

CALLERS = 200
HEALTH_MS = 100.0
"""99 of 100 health checks are answered within this time, whatever goes on."""
WARM_GROWTH_MIB = 12
"""Of the gateway's memory from one storm to the next."""
PEAK_MIB = 100
"""On top of the idle gateway: 200 times a read buffer (64 KiB), a batch for the disk (256 KiB), and the piece in hand."""
KEPT_MIB = 15
"""When all is over and the worker sleeps, on top of what there was before."""


@contextlib.contextmanager
def pulse(server: Server) -> Iterator[Callable[[], list[float]]]:
    """Health checks, one after the other, meanwhile; the result gives their times in milliseconds."""
    command = [sys.executable, "-m", "tests.process.pulse", "127.0.0.1", str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def end() -> list[float]:
            out, _ = process.communicate("\n", timeout=30)
            return [float(line) for line in out.split()]

        try:
            yield end
        finally:
            if process.poll() is None:
                process.kill()


async def storm(server: Server, body: bytes) -> list[httpx.Response]:
    """All callers at once, each on a connection of its own."""
    limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:

        async def one(number: int) -> httpx.Response:
            fields = {"stream": "true"} if number % 4 == 0 else {}
            return await client.post(DOOR, files={"file": (f"{number}.wav", body)}, data=fields)

        return await asyncio.gather(*(one(number) for number in range(CALLERS)))


def memory(server: Server, what: str) -> float:
    """A figure of /proc/PID/status in MiB: VmRSS, VmHWM (its peak), RssAnon (without the pages of files)."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(what + ":"))
    return int(line.split()[1]) / 1024


@pytest.mark.timeout(240)
async def test_two_hundred_uploads_at_once() -> None:
    """Small ones and streams go to one lane, and three times the lane's bound come at once."""
    body = bytes(1_000_000)
    with serving(worker=f"{FAKE} --segment-bytes 400000 --segment-s 0.002", idle_seconds=1) as server:
        idle, private = memory(server, "VmRSS"), memory(server, "RssAnon")
        answers, warm, p99 = await storm(server, body), 0.0, []
        for _ in range(2):
            warm = memory(server, "VmRSS")
            with pulse(server) as times:
                answers += await storm(server, body)
                took = sorted(times())
            assert len(took) >= 20
            p99.append(took[round(0.99 * len(took)) - 1])
        after, peak = memory(server, "VmRSS"), memory(server, "VmHWM")
        print(f"idle {idle:.0f}, warm {warm:.0f}, after {after:.0f}, peak {peak:.0f} MiB; /health p99 {p99} ms")
        assert after <= warm + WARM_GROWTH_MIB
        assert peak <= idle + PEAK_MIB
        assert min(p99) <= HEALTH_MS * GUARD, "in both storms, so it was not the machine"
        check_answers(answers)
        server.until(lambda: server.worker["state"] == "stopped", "no lease left, and so asleep")
        assert running(server) + waiting(server) == 0
        assert server.ps()["spool_bytes"] == 0
        assert not uploads(server.spool)
        server.until(lambda: memory(server, "RssAnon") <= private + KEPT_MIB, "memory given back", 5)


def check_answers(answers: list[httpx.Response]) -> None:
    """Each got its transcript, or a refusal that says when to come back."""
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {200, 429, 503}, statuses
    assert statuses[200] >= 64, statuses
    for answer in answers:
        assert answer.headers["x-request-id"]
        assert "total;dur=" in answer.headers["server-timing"]
        if answer.status_code == 200:
            assert segments_text(3) in answer.text
        else:
            assert answer.json()["error"]["code"] in {"queue_full", "queue_timeout", "spool_full"}
            assert int(answer.headers["retry-after"]) >= 1


# ---------------------------------------------------------------- no room


def test_full_spool(tmp_path: Path) -> None:
    """The second upload does not fit beside the first: it is refused, and the first is not disturbed."""
    path = recording(tmp_path, 700)
    with serving(worker=f"{FAKE} --segment-bytes 70000 --segment-s 0.3", spool_mb=1) as server:
        first = connect(server, path)
        server.until(lambda: running(server) == 1, "the first one runs")
        held = server.ps()["spool_bytes"]
        assert held == path.stat().st_size
        for _ in range(3):
            refused = server.transcribe(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "spool_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert server.ps()["spool_bytes"] == held
            assert len(uploads(server.spool)) == 1
        with first:
            assert first.makefile("rb").readline().split()[1] == b"200"
        server.until(lambda: not uploads(server.spool), "nothing left behind")
        assert server.ps()["spool_bytes"] == 0
        assert server.transcribe(recording(tmp_path, 70)).json()["text"] == segments_text(1)


# ---------------------------------------------------------------- callers who leave


def request_bytes(server: Server, path: Path, **fields: str) -> tuple[bytes, bytes]:
    """Head and body of an upload."""
    request = httpx.Request("POST", server.url + DOOR, files={"file": (path.name, path.read_bytes())}, data=fields)
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    return "\r\n".join([f"POST {DOOR} HTTP/1.1", *lines, "", ""]).encode(), request.read()


def connect(server: Server, path: Path, **fields: str) -> socket.socket:
    """A caller who has sent everything and waits."""
    caller = socket.create_connection(("127.0.0.1", server.port), 30)
    caller.sendall(b"".join(request_bytes(server, path, **fields)))
    return caller


@pytest.mark.parametrize("share", [0.0, 0.0002, 0.5, 0.999999])
def test_leaving_in_the_middle_of_an_upload(tmp_path: Path, share: float) -> None:
    """After the head, inside the part's head, in the middle of the file, and just before the closing boundary."""
    with serving(worker=FAKE) as server:
        head, body = request_bytes(server, recording(tmp_path, 1000))
        sent = body[: round(share * len(body))]
        with socket.create_connection(("127.0.0.1", server.port), 30) as caller:
            caller.sendall(head + sent)
            if len(sent) > 400_000:
                server.until(lambda: bool(uploads(server.spool)), "it arrives")
        server.until(lambda: not uploads(server.spool) and server.ps()["spool_bytes"] == 0, "nothing left behind")
        worker = server.worker
        assert (worker["generation"], worker["leases"]) == (0, 0)
        assert "unexpected_error" not in server.log()


CANCEL_SECONDS = 0.5
STEP_SECONDS = 0.1


@pytest.mark.parametrize("stream", ["false", "true"])
def test_leaving_while_the_worker_works(tmp_path: Path, stream: str) -> None:
    trace = tmp_path / "trace"
    with serving(worker=f"{FAKE} --segment-s {STEP_SECONDS} --trace {trace}") as server:
        with connect(server, recording(tmp_path, 1000), stream=stream):
            server.until(lambda: len(steps(trace)) >= 2, "it works")
        server.until(lambda: running(server) == 0, "cancelled", (CANCEL_SECONDS + STEP_SECONDS) * GUARD)
        done = len(steps(trace))
        assert server.worker["leases"] == 0
        server.until(lambda: not uploads(server.spool), "nothing left in the spool")
        assert server.transcribe(recording(tmp_path, 2)).json()["text"] == segments_text(2)
        assert len(steps(trace)) == done + 2, "the work went on"
        assert server.worker["generation"] == 1


@pytest.mark.parametrize("stream", ["false", "true"])
def test_leaving_the_queue(tmp_path: Path, stream: str) -> None:
    trace = tmp_path / "trace"
    long, short = recording(tmp_path, 1000), recording(tmp_path, 2)
    with serving(worker=f"{FAKE} --segment-s {STEP_SECONDS} --credits 1 --trace {trace}") as server:
        with connect(server, long):
            server.until(lambda: running(server) == 1, "the first one runs")
            with connect(server, short, stream=stream):
                server.until(lambda: waiting(server) == 1, "the second one waits")
            server.until(lambda: waiting(server) == 0, "it has left", CANCEL_SECONDS * GUARD)
            server.until(lambda: len(uploads(server.spool)) == 1, "with its upload")
        server.until(lambda: running(server) == 0, "the first one has left, too")
        assert len({request for _, request, _ in steps(trace)}) == 1


def test_leaving_while_the_worker_starts(tmp_path: Path) -> None:
    """Nobody needs the worker any more; it starts, finds nothing to do, and sleeps again."""
    trace = tmp_path / "trace"
    with serving(worker=f"{FAKE} --slow-load 0.5 --trace {trace}", idle_seconds=0.2) as server:
        with connect(server, recording(tmp_path, 5)):
            server.until(lambda: server.worker["state"] == "starting", "starting")
        server.until(lambda: server.worker["leases"] == 0, "left", CANCEL_SECONDS * GUARD)
        server.until(lambda: server.worker["state"] == "stopped", "asleep")
        assert steps(trace) == []
        assert not uploads(server.spool)


def steps(trace: Path) -> list[tuple[str, str, str]]:
    """What the fake worker began: generation, request, segment."""
    if not trace.exists():
        return []
    rows = (line.split() for line in trace.read_text().splitlines())
    return [(generation, request, index) for generation, request, index in rows]
