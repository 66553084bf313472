"""Lanes and credits: who may go now."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.admission import Lanes
from shared.errors import QueueFull
from shared.messages import Lane


@dataclass(eq=False)
class Job:
    name: str
    lane: Lane = Lane.BATCH
    suspect: bool = False


CREDITS = {Lane.LIVE: 1, Lane.INTERACTIVE: 1, Lane.BATCH: 2}


def test_better_lane_first_then_arrival() -> None:
    lanes = Lanes(10)
    jobs = [Job("b1"), Job("i1", Lane.INTERACTIVE), Job("b2"), Job("l1", Lane.LIVE)]
    for job in jobs:
        lanes.put(job)
    order = [lanes.next(CREDITS) for _ in range(4)]
    assert [job.name for job in order if isinstance(job, Job)] == ["l1", "i1", "b1", "b2"]


def test_credits_of_a_lane_are_its_own() -> None:
    lanes = Lanes(10)
    for number in range(4):
        lanes.put(Job(f"b{number}"))
    assert lanes.next(CREDITS) and lanes.next(CREDITS)
    assert lanes.next(CREDITS) is None
    interactive = Job("i", Lane.INTERACTIVE)
    lanes.put(interactive)
    assert lanes.next(CREDITS) is interactive


def test_a_credit_comes_back() -> None:
    lanes = Lanes(10)
    first, second = Job("1", Lane.INTERACTIVE), Job("2", Lane.INTERACTIVE)
    lanes.put(first)
    lanes.put(second)
    assert lanes.next(CREDITS) is first
    assert lanes.next(CREDITS) is None
    lanes.done(first)
    assert lanes.next(CREDITS) is second


def test_the_queue_is_bounded_by_lane() -> None:
    lanes = Lanes(2)
    lanes.put(Job("1"))
    lanes.put(Job("2"))
    with pytest.raises(QueueFull):
        lanes.put(Job("3"))
    lanes.put(Job("4", Lane.INTERACTIVE))


def test_returned_jobs_keep_their_order_and_are_never_refused() -> None:
    lanes = Lanes(2)
    jobs = [Job("1"), Job("2")]
    for job in jobs:
        lanes.put(job)
    for _ in jobs:
        lanes.next(CREDITS)
    lanes.put(Job("3"))
    lanes.put(Job("4"))
    lanes.put_back(lanes.take_running())
    assert [job.name for job in lanes if isinstance(job, Job)] == ["1", "2", "3", "4"]


def test_a_suspect_waits_until_it_is_alone_and_then_stays_alone() -> None:
    lanes = Lanes(10)
    neighbour, suspect, later = Job("n"), Job("s", suspect=True), Job("l")
    lanes.put(neighbour)
    assert lanes.next(CREDITS) is neighbour
    lanes.put(suspect)
    lanes.put(later)
    assert lanes.next(CREDITS) is None
    lanes.done(neighbour)
    assert lanes.next(CREDITS) is suspect
    assert lanes.next(CREDITS) is None
    suspect.suspect = False
    assert lanes.next(CREDITS) is later


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "next", "done", "lost", "remove"]), st.sampled_from(list(Lane))), max_size=80
    )
)
def test_no_job_is_lost_or_doubled(script: list[tuple[str, Lane]]) -> None:
    lanes = Lanes(5)
    alive: set[Job] = set()
    running: list[Job] = []
    for verb, lane in script:
        if verb == "put":
            job = Job("x", lane)
            try:
                lanes.put(job)
            except QueueFull:
                continue
            alive.add(job)
        elif verb == "next":
            chosen = lanes.next(CREDITS)
            if isinstance(chosen, Job):
                running.append(chosen)
        elif verb == "done" and running:
            job = running.pop()
            lanes.done(job)
            alive.discard(job)
        elif verb == "lost":
            lanes.put_back(lanes.take_running())
            running.clear()
        elif verb == "remove":
            waiting = next(iter(lanes), None)
            if isinstance(waiting, Job) and lanes.remove(waiting):
                alive.discard(waiting)
        for one in Lane:
            assert lanes.running(one) <= CREDITS[one]
    waiting_now = {job for job in lanes if isinstance(job, Job)}
    assert waiting_now | set(running) == alive
    assert not waiting_now & set(running)
