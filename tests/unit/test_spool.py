"""The spool on a real disk: bytes, quota, a full device, dead and living neighbours.

Disk work on the event loop would fail every asynchronous test here (tests/conftest.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.files.spool import BATCH_BYTES, BUFFER_BYTES, Spool, filesystem_type
from shared import errors

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1024 * 1024
QUOTA = 24 * MEBIBYTE


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool", QUOTA)
    yield made
    made.close()


def leftovers(spool: Spool) -> list[str]:
    """Files of uploads on disk."""
    return sorted(path.name for path in spool.folder.iterdir() if path.name != "lock")


def other_gateway(directory: Path, then: str) -> subprocess.Popen[bytes]:
    """Another process with a spool in ``directory`` and a file in it; says so on its standard output."""
    code = (
        "import asyncio, pathlib, sys, os\n"
        "from gateway.files.spool import Spool\n"
        f"spool = Spool(pathlib.Path({str(directory)!r}), 1 << 20)\n"
        "async def fill():\n"
        "    file = spool.create()\n"
        "    await file.write(b'left behind')\n"
        "    await file.close()\n"
        "asyncio.run(fill())\n"
        "print(spool.folder, flush=True)\n"
        f"{then}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def test_bytes_arrive_as_they_were_sent(spool: Spool) -> None:
    rng = random.Random(1)
    pieces = [rng.randbytes(rng.choice([0, 1, 17, 4096, 70_000, 300_000])) for _ in range(40)]
    file = spool.create()
    for piece in pieces:
        await file.write(memoryview(piece))
    await file.close()
    assert file.path.read_bytes() == b"".join(pieces)
    assert file.size == spool.used_bytes == sum(map(len, pieces))


async def test_only_the_owner_may_read(spool: Spool) -> None:
    file = spool.create()
    await file.write(b"private")
    await file.close()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "var-tmp"
    shared.mkdir()
    shared.chmod(0o755)
    spool = Spool(shared, MEBIBYTE)
    spool.close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755


async def test_bytes_gather_to_a_batch_before_they_are_written(spool: Spool) -> None:
    file = spool.create()
    await file.write(bytes(BATCH_BYTES - 1))
    assert leftovers(spool) == []
    await file.write(b"x")
    assert file.path.stat().st_size == BATCH_BYTES


async def test_many_uploads_gather_less_each(spool: Spool) -> None:
    files = [spool.create() for _ in range(BUFFER_BYTES // BATCH_BYTES * 4)]
    for file in files:
        await file.write(bytes(BATCH_BYTES // 4 - 1))
    assert leftovers(spool) == []
    await files[0].write(b"x")
    assert files[0].path.stat().st_size == BATCH_BYTES // 4
    for file in files:
        file.discard()
    assert spool.batch_bytes == BATCH_BYTES


async def test_a_slow_disk_holds_the_upload_back(spool: Spool) -> None:
    disk = threading.Event()
    blocked = spool.submit(disk.wait)
    file = spool.create()
    writing = asyncio.ensure_future(file.write(bytes(BATCH_BYTES)))
    try:
        done, _ = await asyncio.wait({writing}, timeout=0.05)
        assert not done
    finally:
        disk.set()
    await writing
    assert blocked.result() and file.path.stat().st_size == BATCH_BYTES


async def test_over_the_quota_nothing_is_left(spool: Spool) -> None:
    file = spool.create()
    with pytest.raises(errors.SpoolFull) as caught:
        for _ in range(300):
            await file.write(bytes(100_000))
    await spool.settle()
    assert caught.value.retry_after and caught.value.retryable
    assert spool.used_bytes == 0
    assert leftovers(spool) == []


async def test_the_quota_is_shared_and_comes_back(spool: Spool) -> None:
    first, second = spool.create(), spool.create()
    await first.write(bytes(6 * MEBIBYTE))
    with pytest.raises(errors.SpoolFull):
        await second.write(bytes(QUOTA - 5 * MEBIBYTE))
    assert spool.used_bytes == 6 * MEBIBYTE
    first.discard()
    await spool.settle()
    third = spool.create()
    await third.write(bytes(QUOTA))
    await third.close()
    assert spool.free_bytes == 0


async def test_room_can_be_held_before_the_bytes_come(spool: Spool) -> None:
    file = spool.create()
    file.reserve(5 * MEBIBYTE)
    await file.write(bytes(MEBIBYTE))
    assert spool.used_bytes == 5 * MEBIBYTE
    with pytest.raises(errors.SpoolFull):
        file.reserve(QUOTA + 1)
    assert spool.used_bytes == 5 * MEBIBYTE
    file.discard()
    await spool.settle()
    assert spool.used_bytes == 0


async def test_a_full_device_is_a_full_spool(spool: Spool) -> None:
    file = spool.create()
    await file.write(bytes(BATCH_BYTES))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._fd)  # from here on the kernel answers every write with ENOSPC
    os.close(full)
    with pytest.raises(errors.SpoolFull) as caught:
        await file.write(bytes(BATCH_BYTES))
    await spool.settle()
    assert caught.value.retry_after
    assert (spool.used_bytes, leftovers(spool)) == (0, [])


async def test_a_broken_disk_is_not_a_full_one(spool: Spool) -> None:
    file = spool.create()
    (spool.folder / "lock").unlink()
    spool.folder.rmdir()
    with pytest.raises(errors.NapscribeError) as caught:
        await file.write(bytes(BATCH_BYTES))
    assert caught.value.code == "internal_error"
    assert "No such file" in caught.value.message
    spool.folder.mkdir()


async def test_a_cancelled_write_leaves_nothing(spool: Spool) -> None:
    disk = threading.Event()
    file = spool.create()
    await file.write(bytes(BATCH_BYTES))
    spool.submit(disk.wait)
    writing = asyncio.ensure_future(file.write(bytes(BATCH_BYTES)))
    await asyncio.wait({writing}, timeout=0.01)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    disk.set()
    await spool.settle()
    assert (spool.used_bytes, leftovers(spool)) == (0, [])


async def test_discard_is_idempotent_and_final(spool: Spool) -> None:
    file, other = spool.create(), spool.create()
    await file.write(bytes(BATCH_BYTES))
    await other.write(bytes(1000))
    file.discard()
    file.discard()
    await spool.settle()
    assert spool.used_bytes == 1000
    with pytest.raises(ValueError, match="ended"):
        await file.write(b"more")
    await file.close()
    assert leftovers(spool) == []


async def test_the_disk_thread_leaves_with_the_last_file(spool: Spool) -> None:
    def disk_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("spool")]

    first, second = spool.create(), spool.create()
    await first.write(bytes(BATCH_BYTES))
    await second.write(bytes(BATCH_BYTES))
    first.discard()
    await spool.settle()
    assert len(disk_threads()) == 1
    second.discard()
    await spool.settle()
    for thread in disk_threads():
        thread.join(10)
    assert disk_threads() == []
    again = spool.create()
    await again.write(bytes(BATCH_BYTES))
    assert again.path.exists()


async def test_close_takes_everything_along(spool: Spool) -> None:
    file, other = spool.create(), spool.create()
    await file.write(bytes(BATCH_BYTES))
    await asyncio.to_thread(spool.close)
    await asyncio.to_thread(spool.close)
    assert list(spool.directory.iterdir()) == []
    with pytest.raises(errors.ShuttingDown):
        await file.write(bytes(BATCH_BYTES))
    with pytest.raises(errors.ShuttingDown):
        await other.write(bytes(BATCH_BYTES))
    file.discard()


def test_only_the_dead_are_swept(spool: Spool) -> None:
    dead = other_gateway(spool.directory, "os._exit(0)")
    living = other_gateway(spool.directory, "sys.stdin.read()")
    assert dead.stdout and living.stdout
    dead_folder, living_folder = (Path(process.stdout.readline().decode().strip()) for process in (dead, living))  # type: ignore[union-attr]
    dead.communicate(timeout=30)
    try:
        assert dead_folder.exists()
        assert spool.sweep() == 1
        assert not dead_folder.exists()
        assert (living_folder / "00000001").read_bytes() == b"left behind"
        assert spool.folder.exists()
    finally:
        living.communicate(timeout=30)
    assert spool.sweep() == 1
    assert [path.name for path in spool.directory.iterdir()] == [spool.folder.name]


def test_what_is_not_ours_is_not_swept(spool: Spool, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (spool.directory / "gateway-link").symlink_to(precious)
    (spool.directory / "gateway-file").write_text("x")
    (spool.directory / "music").mkdir()
    assert spool.sweep() == 0
    assert (precious / "file").exists()
    assert sorted(path.name for path in spool.directory.iterdir()) == sorted(
        ["gateway-link", "gateway-file", "music", spool.folder.name]
    )


def test_a_sweeper_never_takes_a_folder_from_its_owner(tmp_path: Path) -> None:
    """One thread claims folders while another sweeps as fast as it can: whoever has claimed one still has it."""
    sweeper = Spool(tmp_path, MEBIBYTE)
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweeper.sweep()

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        claimed = [Spool(tmp_path, MEBIBYTE) for _ in range(150)]
        assert all((spool.folder / "lock").exists() for spool in claimed)
    finally:
        stop.set()
        thread.join()
    for spool in [*claimed, sweeper]:
        spool.close()


def test_a_spool_in_memory_is_warned_of() -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or filesystem_type(memory) != "tmpfs":
        pytest.skip("no tmpfs here")
    directory = memory / f"napscribe-test-{os.getpid()}"
    spool = Spool(directory, MEBIBYTE)
    try:
        assert str(directory) in spool.warning and "tmpfs" in spool.warning
    finally:
        spool.close()
        directory.rmdir()


def test_the_type_of_a_filesystem_is_what_stat_says(tmp_path: Path) -> None:
    assert filesystem_type(Path("/proc")) == "proc"
    assert filesystem_type(tmp_path / "missing") == ""


def test_a_disk_is_not_warned_of(spool: Spool) -> None:
    if filesystem_type(spool.directory) in {"tmpfs", "ramfs"}:
        pytest.skip("the tests' folder is in memory")
    assert spool.warning == ""
