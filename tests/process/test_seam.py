"""Gateway and worker as two processes: work, sleep, crashes, hangs, nonsense. The worker is tests/fakes/worker.py."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.jobs.file_job import FileJob
from gateway.life import channel, supervisor
from gateway.life.lifecycle import Phase, Policy
from gateway.life.process import WorkerProcess
from gateway.life.supervisor import Lease
from shared.errors import (
    Cancelled,
    ModelLoadFailed,
    NapscribeError,
    QueueFull,
    QueueTimeout,
    ShuttingDown,
    WorkerCrashed,
    WorkerUnavailable,
)
from shared.messages import Lane, Ready
from shared.recorder import Recorder
from tests.process.conftest import FAST, StartSeam, alive


async def test_a_job_wakes_the_worker_and_gets_every_segment(seam: StartSeam) -> None:
    s = await seam()
    assert await s.transcribe(segments=4) == ["w0", "w1", "w2", "w3"]
    assert s.supervisor.report()["generation"] == 1


async def test_sleeps_when_idle_and_wakes_again(seam: StartSeam) -> None:
    s = await seam(policy=Policy(idle_s=0.1, start_stall_s=10, stop_s=1))
    for generation in range(1, 6):
        assert await s.transcribe(segments=2) == ["w0", "w1"]
        pid = s.pid
        await s.phase(Phase.STOPPED)
        assert not alive(pid)
        assert s.supervisor.report()["generation"] == generation
    assert s.reclaims == 5


async def test_a_long_job_is_not_cut_by_the_idle_time(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.2", policy=Policy(idle_s=0.05, start_stall_s=10, stop_s=1))
    assert len(await s.transcribe(segments=5)) == 5
    assert s.supervisor.report()["generation"] == 1


async def test_a_job_that_comes_while_the_worker_leaves_gets_the_next_one(seam: StartSeam) -> None:
    s = await seam("--ignore-stop --until 1", policy=Policy(idle_s=0, start_stall_s=10, stop_s=0.2))
    await s.transcribe()
    await s.phase(Phase.STOPPING)
    assert await s.transcribe() == ["w0", "w1", "w2"]
    assert s.supervisor.report()["generation"] == 2


async def test_a_worker_that_ignores_stop_and_sigterm_is_killed(seam: StartSeam) -> None:
    s = await seam("--ignore-stop --ignore-term")
    await s.transcribe()
    pid = s.pid
    assert await asyncio.wait_for(s.supervisor.unload(force=False), 5)
    assert not alive(pid)


async def test_crash_resumes_after_the_last_finished_segment(seam: StartSeam) -> None:
    s = await seam("--die-after 3 --until 1 --segment-s 0.3")
    job, lease = s.submit(segments=6)
    with lease:
        await job.result()
    assert [segment.text for segment in job.segments] == [f"w{index}" for index in range(6)]
    assert s.steps() == [(1, "r1", index) for index in range(4)] + [(2, "r1", index) for index in range(3, 6)]
    assert (job.restarts, job.redone_segments) == (1, 1)


async def test_sigkill_between_jobs_is_nobodys_fault(seam: StartSeam) -> None:
    s = await seam()
    await s.transcribe()
    os.kill(s.pid, signal.SIGKILL)
    assert await s.transcribe() == ["w0", "w1", "w2"]


async def test_poison_fails_alone(seam: StartSeam) -> None:
    s = await seam("--poison arsenic --segment-s 0.02 --credits 4")
    neighbours = [asyncio.ensure_future(s.transcribe(segments=5)) for _ in range(3)]
    with pytest.raises(WorkerCrashed) as caught:
        await s.transcribe(prompt="with arsenic")
    assert "2 times" in caught.value.message
    assert [len(texts) for texts in await asyncio.gather(*neighbours)] == [5, 5, 5]


async def test_a_suspect_that_moves_on_is_not_blamed_for_the_next_crash(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.05")
    job, lease = s.submit(segments=8)
    with lease:
        for done in (1, 3, 5):
            while len(job.segments) < done or not s.supervisor.report()["pid"]:
                await asyncio.sleep(0.005)
            os.kill(s.pid, signal.SIGKILL)
        await job.result()
    assert len(job.segments) == 8
    assert job.restarts == 3
    assert job.redone_segments <= 3


async def test_hanging_step_is_found_and_replaced(seam: StartSeam) -> None:
    s = await seam("--stall-after 1 --until 1 --max-step-s 0.3")
    assert await s.transcribe() == ["w0", "w1", "w2"]
    assert s.supervisor.report()["generation"] == 2


async def test_frozen_process_is_found_and_replaced(seam: StartSeam) -> None:
    s = await seam("--freeze-after 1 --until 1")
    assert await s.transcribe() == ["w0", "w1", "w2"]
    assert s.supervisor.report()["generation"] == 2


async def test_slow_load_is_patience_not_a_hang(seam: StartSeam) -> None:
    s = await seam("--slow-load 1.2", policy=Policy(idle_s=60, start_stall_s=0.8, stop_s=0.3))
    assert len(await s.transcribe()) == 3
    assert s.supervisor.report()["generation"] == 1


async def test_a_worker_that_is_ready_before_its_spawn_has_returned(
    seam: StartSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop with two hundred uploads in hand comes back to the spawn late, and must not miss what was said meanwhile."""
    spawn = WorkerProcess.spawn

    async def slow(argv: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> WorkerProcess:
        process = await spawn(argv, env, descriptors)
        await s.until(lambda: any(isinstance(event, Ready) for event in s.events), "said to be ready")
        return process

    monkeypatch.setattr(WorkerProcess, "spawn", slow)
    s = await seam("")
    assert len(await asyncio.wait_for(s.transcribe(), 10)) == 3
    with s.supervisor.lease():
        worker = await asyncio.wait_for(s.supervisor.load(), 10)
        assert worker.pid == s.pid
        assert alive(worker.pid)


async def test_a_start_without_progress_is_refused_after_three(seam: StartSeam) -> None:
    s = await seam("--never-ready", policy=Policy(60, start_stall_s=0.6, stop_s=0.3, cooldown_s=0.02))
    with pytest.raises(WorkerUnavailable, match="no progress"):
        await s.transcribe()
    assert s.supervisor.report()["generation"] == 3


async def test_a_start_for_which_there_are_no_descriptors_holds_nobody_up(
    seam: StartSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await seam()

    def exhausted() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(Recorder, "create", exhausted)
        with pytest.raises(NapscribeError, match="Too many open files"):
            await asyncio.wait_for(made.transcribe(1), 10)
    assert len(await asyncio.wait_for(made.transcribe(2), 20)) == 2


async def test_who_is_refused_after_a_crash_is_forgotten(seam: StartSeam) -> None:
    """It had been dispatched, and waited again."""
    made = await seam("--segment-s 0.05", policy=replace(FAST, cooldown_s=5, cooldown_max_s=5))
    for _ in range(2):
        job, lease = made.submit(50)
        await made.until(lambda: bool(job.dispatched_ns), "dispatched")  # noqa: B023
        made.supervisor.unresponsive(made.supervisor.report()["generation"], "told so")  # type: ignore[arg-type]
        await made.until(lambda: bool(job.restarts), "its worker dies")  # noqa: B023
        made.dispatcher.refuse_all(WorkerUnavailable("No worker."))
        lease.release()
        with pytest.raises(WorkerUnavailable):
            await job.result()
    assert not made.dispatcher._jobs


async def test_a_start_that_dies_twice_and_then_works(seam: StartSeam) -> None:
    s = await seam("--die-on-load --until 2")
    assert len(await s.transcribe()) == 3
    assert s.supervisor.report()["generation"] == 3


async def test_a_model_that_does_not_exist_says_so_at_once(seam: StartSeam) -> None:
    s = await seam("--fail-load")
    with pytest.raises(ModelLoadFailed, match="No such model"):
        await s.transcribe()
    assert s.supervisor.report()["generation"] == 1


async def test_wrong_version_is_a_typed_error(seam: StartSeam) -> None:
    s = await seam("--wrong-version --slow-load 5")
    with pytest.raises(ModelLoadFailed, match="protocol"):
        await s.transcribe()


async def test_garbage_replaces_the_worker(seam: StartSeam) -> None:
    s = await seam("--garbage --slow-load 0.2 --until 1")
    assert len(await s.transcribe()) == 3
    assert s.supervisor.report()["generation"] == 2


async def test_flood_on_stderr_blocks_nobody(seam: StartSeam, capsys: pytest.CaptureFixture[str]) -> None:
    s = await seam("--flood-stderr 30")
    assert len(await s.transcribe()) == 3
    assert len(capsys.readouterr().err) < 2_000_000


async def test_forked_children_die_with_the_worker(seam: StartSeam, tmp_path: Path) -> None:
    note = tmp_path / "child"
    s = await seam(f"--fork-child {note}")
    await s.transcribe()
    child = int(note.read_text())
    assert alive(child)
    await s.supervisor.unload(force=False)
    await s.until(lambda: not alive(child), "child gone")


async def test_better_lane_goes_first(seam: StartSeam) -> None:
    s = await seam("--credits 1 --segment-s 0.05")
    long = asyncio.ensure_future(s.transcribe(segments=20))
    await s.until(lambda: len(s.steps()) > 2, "started")
    await s.transcribe(segments=2, lane=Lane.INTERACTIVE)
    assert not long.done()
    await long
    order = [request for _, request, _ in s.steps()]
    first, last = order.index("r2"), len(order) - 1 - order[::-1].index("r2")
    assert order[first : last + 1] == ["r2", "r2"]


async def test_cancel_stops_the_work_at_the_next_step(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.05")
    job, lease = s.submit(segments=1000)
    await s.until(lambda: len(job.segments) >= 2, "started")
    s.dispatcher.abandon(job)
    lease.release()
    with pytest.raises(Cancelled):
        await job.result()
    await s.until(lambda: s.dispatcher.report()["batch"]["running"] == 0, "credit back")
    assert len(s.steps()) < 10
    assert len(await s.transcribe()) == 3


async def test_queue_is_bounded_and_says_when_to_come_back(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.2 --credits 1", max_queue=2)
    first = asyncio.ensure_future(s.transcribe())
    await s.until(lambda: bool(s.steps()), "started")
    waiting = [asyncio.ensure_future(s.transcribe(segments=1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await s.transcribe()
    assert (caught.value.retry_after or 0) >= 1
    await asyncio.gather(first, *waiting)


async def test_waiting_too_long_is_a_typed_error(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.1 --credits 1", queue_seconds=0.5)
    first = asyncio.ensure_future(s.transcribe(segments=40))
    await s.until(lambda: bool(s.steps()), "started")
    with pytest.raises(QueueTimeout):
        await s.transcribe()
    first.cancel()


async def test_forced_unload_fails_what_runs(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.2")
    job, lease = s.submit(segments=100)
    await s.until(lambda: bool(job.segments), "started")
    pid = s.pid
    unloading = asyncio.ensure_future(s.supervisor.unload(force=True))
    with lease, pytest.raises(WorkerUnavailable, match="by force"):
        await job.result()
    assert await asyncio.wait_for(unloading, 5)
    assert not alive(pid)


async def test_forced_unload_is_done_although_somebody_starts_another_worker(seam: StartSeam) -> None:
    s = await seam("--slow-load 0.5")
    with s.supervisor.lease():
        first = (await asyncio.wait_for(s.supervisor.ensure_ready(), 10)).generation
        unloading = asyncio.ensure_future(s.supervisor.unload(force=True))
        assert await asyncio.wait_for(unloading, 5)
        assert s.supervisor.report()["generation"] != first or s.supervisor.report()["pid"] is None


async def test_unload_lets_running_work_finish(seam: StartSeam) -> None:
    s = await seam("--segment-s 0.05")
    work = asyncio.ensure_future(s.transcribe(segments=6))
    await s.until(lambda: bool(s.steps()), "started")
    assert await asyncio.wait_for(s.supervisor.unload(force=False), 10)
    assert len(await work) == 6


async def test_close_during_a_start_leaves_no_process(seam: StartSeam) -> None:
    s = await seam("--slow-load 30")
    job, lease = s.submit()
    await s.until(lambda: s.supervisor.report()["pid"] is not None, "spawned")
    pid = s.pid
    await asyncio.wait_for(s.supervisor.aclose(), 5)
    assert not alive(pid)
    with lease, pytest.raises((ShuttingDown, WorkerUnavailable)):
        await job.result()


async def test_a_worker_that_does_not_read_its_commands_is_replaced(
    seam: StartSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who could not send says it to the next one, so there must be a next one."""
    monkeypatch.setattr(channel, "MAX_WAITING", 10)
    monkeypatch.setattr(supervisor, "MISSED_PULSES", 1_000)  # not by its silence
    s = await seam("--credits 50000", max_queue=50_000)
    with s.supervisor.lease():
        await s.supervisor.ensure_ready()
        os.kill(s.pid, signal.SIGSTOP)
        jobs: list[tuple[FileJob, Lease]] = []
        while s.supervisor.phase is Phase.READY and len(jobs) < 40_000:
            jobs += [s.submit(segments=1) for _ in range(100)]
            await asyncio.sleep(0)
        assert s.supervisor.report()["reason"] == "it sent garbage: it does not read its commands"
        for job, lease in jobs:
            s.dispatcher.abandon(job)
            lease.release()
        assert len(await asyncio.wait_for(s.transcribe(2), 20)) == 2


async def test_nothing_is_lost_at_the_high_water_mark(seam: StartSeam) -> None:
    """A stopped reader: far more commands than ZeroMQ's pipe holds, then the reader goes on. All arrive, in order."""
    s = await seam("--credits 5000", max_queue=5000, policy=FAST)
    with s.supervisor.lease():
        await s.supervisor.ensure_ready()
        os.kill(s.pid, signal.SIGSTOP)
        jobs = [s.submit(segments=1) for _ in range(3000)]
        os.kill(s.pid, signal.SIGCONT)
        for job, lease in jobs:
            with lease:
                await job.result()
    assert [request for _, request, _ in s.steps()] == [f"r{number}" for number in range(1, 3001)]
