"""Calls from other threads all arrive, however few wake-ups they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.loop import EventLoop

THREADS, CALLS = 4, 5_000


class Counting(EventLoop):
    """Counts the bytes that go to its pipe."""

    def __init__(self) -> None:
        self.wake_ups = 0
        super().__init__()

    def _write_to_self(self) -> None:
        before = self._wake_up_sent
        super()._write_to_self()
        self.wake_ups += not before


@pytest.fixture
def loop() -> Iterator[Counting]:
    loop = Counting()
    yield loop
    loop.close()


def test_calls_queued_while_the_loop_is_busy_share_one_wake_up(loop: Counting) -> None:
    heard: list[int] = []
    for number in range(100):
        loop.call_soon_threadsafe(heard.append, number)
    loop.call_soon_threadsafe(loop.stop)
    loop.run_forever()
    assert heard == list(range(100))
    assert loop.wake_ups == 1


def test_a_loop_that_sleeps_again_is_woken_again(loop: Counting) -> None:
    """Each call waits for the one before, so that the loop has gone to sleep in between."""

    async def hear() -> int:
        heard = asyncio.Event()
        for _ in range(200):
            heard.clear()
            await asyncio.to_thread(loop.call_soon_threadsafe, heard.set)
            await asyncio.wait_for(heard.wait(), 10)
        return loop.wake_ups

    assert loop.run_until_complete(hear()) >= 200


def test_no_call_is_lost_between_threads(loop: Counting) -> None:
    heard: list[tuple[int, int]] = []

    async def hear() -> None:
        done = asyncio.Event()

        def take(thread: int, number: int) -> None:
            heard.append((thread, number))
            if len(heard) == THREADS * CALLS:
                done.set()

        def call(thread: int) -> None:
            for number in range(CALLS):
                loop.call_soon_threadsafe(take, thread, number)

        threads = [threading.Thread(target=call, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), 60)
        for thread in threads:
            thread.join()

    loop.run_until_complete(hear())
    for thread in range(THREADS):
        assert [number for who, number in heard if who == thread] == list(range(CALLS))


def test_an_interrupt_while_the_pipe_is_read_costs_no_wake_up(loop: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C comes as an exception out of the reading; what shuts the loop down still needs to be woken."""
    process = loop._process_self_data  # type: ignore[attr-defined]
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(data: bytes) -> None:
        process(data)
        for interrupt in interrupts:
            raise interrupt

    monkeypatch.setattr(loop, "_process_self_data", interrupted)
    loop.call_soon_threadsafe(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert not loop._wake_up_sent
