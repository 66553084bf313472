"""When a live stream has run dry: not between two pieces of a recorder, not in a stall of the network, and soon after the last one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from worker.live.playout import LEAD_NS, STALL_NS, Playout

SECOND = 1_000_000_000


def stalls(arrivals: list[tuple[int, int]]) -> list[int]:
    """Where in a list of (time in ns, samples) the stream has stalled before the next piece comes."""
    playout, found = Playout(), []
    for index, ((now, samples), (then, _)) in enumerate(pairwise(arrivals)):
        playout.add(samples, now)
        if playout.stalled_from_ns <= then:
            found.append(index)
    return found


@given(st.integers(10, 10_000), st.integers(2, 60))
def test_pieces_at_their_pace_never_stall(milliseconds: int, count: int) -> None:
    """As a recorder sends them: 10 ms or 10 s at once, and then nothing until there is as much again."""
    assert stalls([(n * milliseconds * 1_000_000, milliseconds * 16) for n in range(count)]) == []


@given(st.lists(st.integers(0, 2_900), min_size=2, max_size=80))
def test_a_network_that_holds_frames_back_is_no_stall(delays_ms: list[int]) -> None:
    """Frames of 20 ms in order, each late by whatever it is."""
    now, arrivals = 0, []
    for index, delay in enumerate(delays_ms):
        now = max(now, (index * 20 + delay) * 1_000_000)
        arrivals.append((now, 320))
    assert stalls(arrivals) == []


@given(st.integers(1, 600), st.integers(0, 8))
def test_after_the_last_piece_it_is_a_matter_of_seconds(seconds: int, faster: int) -> None:
    """However much has been sent, and however fast."""
    playout, now = Playout(), 0
    for n in range(seconds):
        now = n * SECOND // (faster or 1)
        playout.add(16_000, now)
    assert now + STALL_NS < playout.stalled_from_ns <= now + LEAD_NS + STALL_NS
    if faster <= 1:
        assert playout.stalled_from_ns == now + SECOND + STALL_NS


def test_a_stall_is_one() -> None:
    assert stalls([(0, 16_000), (SECOND, 16_000), (6 * SECOND, 16_000), (7 * SECOND, 0)]) == [1]
