"""The worker's life, stepped by hand: no clock, no process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.life.lifecycle import (
    Acquire,
    AnnounceLost,
    AnnounceReady,
    Arm,
    BecameReady,
    Close,
    Disarm,
    Effect,
    End,
    Event,
    Exited,
    Fired,
    Phase,
    Policy,
    Progressed,
    Reclaim,
    RefuseWaiters,
    Release,
    Settled,
    Spawn,
    State,
    Timer,
    Unload,
    Unresponsive,
    cooldown,
    step,
)

POLICY = Policy(idle_s=60, start_stall_s=10, stop_s=5, cooldown_s=0.5, cooldown_max_s=8)


def play(*events: Event, state: State | None = None) -> tuple[State, list[Effect]]:
    """Step through events; the effects of the last one."""
    state = state or State()
    effects: list[Effect] = []
    for event in events:
        state, effects = step(state, event, POLICY)
    return state, effects


def ready(leases: int = 1) -> State:
    state, _ = play(Acquire(), BecameReady(1))
    return replace(state, leases=leases)


def test_first_lease_starts_the_worker() -> None:
    state, effects = play(Acquire())
    assert state.phase is Phase.STARTING
    assert effects == [Spawn(1), Arm(Timer.STALL, 10)]


def test_second_lease_starts_nothing() -> None:
    _, effects = play(Acquire(), Acquire())
    assert effects == []


def test_progress_moves_the_stall_deadline() -> None:
    assert play(Acquire(), Progressed(1))[1] == [Arm(Timer.STALL, 10)]


def test_stall_kills_at_once() -> None:
    state, effects = play(Acquire(), Fired(Timer.STALL))
    assert End(1, 2) in effects
    assert state.phase is Phase.STOPPING


def test_idle_is_armed_at_ready_without_leases() -> None:
    state, _ = play(Acquire(), Release())
    state, effects = play(BecameReady(1), state=state)
    assert effects == [Disarm(Timer.STALL), AnnounceReady(1), Arm(Timer.IDLE, 60)]
    assert state.phase is Phase.READY


def test_idle_is_armed_at_the_last_release_only() -> None:
    state, effects = play(Release(), state=ready(leases=2))
    assert effects == []
    assert play(Release(), state=state)[1] == [Arm(Timer.IDLE, 60)]


def test_idle_timer_that_lost_the_race_changes_nothing() -> None:
    state = ready(leases=1)
    assert play(Fired(Timer.IDLE), state=state) == (state, [])


def test_idle_end_to_end() -> None:
    state, effects = play(Release(), Fired(Timer.IDLE), state=ready())
    assert state.phase is Phase.STOPPING
    assert End(1, 0) in effects
    state, effects = play(Exited(1, "exit 0"), state=state)
    assert state.phase is Phase.STOPPED
    assert AnnounceLost(1, crashed=False, reason="idle") in effects
    assert Reclaim() in effects


def test_stop_grows_harder() -> None:
    state, _ = play(Release(), Fired(Timer.IDLE), state=ready())
    seen = []
    for _ in range(3):
        state, effects = play(Fired(Timer.KILL), state=state)
        seen += [effect.hardness for effect in effects if isinstance(effect, End)]
    assert seen == [1, 2, 2]


def test_a_job_while_stopping_waits_and_starts_the_next_generation() -> None:
    state, _ = play(Release(), Fired(Timer.IDLE), state=ready())
    state, effects = play(Acquire(), state=state)
    assert (state.phase, effects) == (Phase.STOPPING, [])
    state, effects = play(Exited(1, "exit 0"), state=state)
    assert state.phase is Phase.STARTING
    assert Spawn(2) in effects


def test_unload_drains_and_a_job_takes_it_back() -> None:
    state, _ = play(Unload(), state=ready())
    assert state.phase is Phase.DRAINING
    back, _ = play(Acquire(), state=state)
    assert back.phase is Phase.READY
    gone, effects = play(Release(), state=state)
    assert gone.phase is Phase.STOPPING
    assert End(1, 0) in effects


def test_forced_unload_tells_the_callers_and_kills() -> None:
    state, effects = play(Unload(force=True), state=ready())
    assert effects[0] == RefuseWaiters("The worker was unloaded by force.", retry=True)
    assert End(1, 2) in effects
    _, effects = play(Release(), Exited(1, "SIGKILL"), state=state)
    assert AnnounceLost(1, crashed=False, reason="unloaded by force") in effects


def test_force_is_heard_while_a_worker_takes_its_time_to_leave() -> None:
    state, _ = play(Unload(), state=play(Release(), state=ready())[0])
    assert (state.phase, state.hardness) == (Phase.STOPPING, 0)
    state, effects = play(Unload(force=True), state=state)
    assert (state.phase, state.hardness) == (Phase.STOPPING, 2)
    assert End(1, 2) in effects
    assert play(Unload(force=True), state=state)[1] == []


def test_first_crash_of_a_proved_worker_restarts_at_once() -> None:
    state, effects = play(Exited(1, "SIGKILL"), state=ready())
    assert state.phase is Phase.STARTING
    assert effects.index(AnnounceLost(1, crashed=True, reason="SIGKILL")) < effects.index(Spawn(2))


def test_crashes_in_a_row_cool_down_longer_and_longer() -> None:
    state = ready()
    delays = []
    for generation in range(1, 8):
        state, effects = play(Exited(generation, "SIGSEGV"), state=state)
        delays += [effect.seconds for effect in effects if isinstance(effect, Arm) and effect.timer is Timer.COOLDOWN]
        if state.phase is Phase.COOLDOWN:
            state, _ = play(Fired(Timer.COOLDOWN), state=state)
        state, _ = play(BecameReady(generation + 1), state=state)
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_finished_work_forgets_earlier_crashes() -> None:
    state, _ = play(Exited(1, "SIGKILL"), BecameReady(2), Settled(2), state=ready())
    assert state.failures == 0


def test_failed_starts_tell_the_waiters_after_three() -> None:
    state, _ = play(Acquire())
    told = []
    for generation in (1, 2, 3):
        state, effects = play(Exited(generation, "exit 1"), state=state)
        told.append(any(isinstance(effect, RefuseWaiters) for effect in effects))
        state, _ = play(Fired(Timer.COOLDOWN), state=state)
    assert told == [False, False, True]


def test_a_start_that_cannot_succeed_tells_at_once() -> None:
    state, _ = play(Acquire())
    _, effects = play(Exited(1, "no such model", retry=False), state=state)
    assert RefuseWaiters("no such model", retry=False) in effects


def test_cooldown_without_demand_ends_in_stopped() -> None:
    state, _ = play(Acquire(), Exited(1, "exit 1"), Release(), Fired(Timer.COOLDOWN))
    assert state.phase is Phase.STOPPED


def test_hung_worker_is_killed_and_replaced() -> None:
    state, effects = play(Unresponsive(1, "no pong"), state=ready())
    assert End(1, 2) in effects
    state, effects = play(Exited(1, "SIGKILL"), state=state)
    assert AnnounceLost(1, crashed=True, reason="no pong") in effects
    assert Spawn(2) in effects


@pytest.mark.parametrize("event", [Progressed(7), BecameReady(7), Settled(7), Exited(7, "x"), Unresponsive(7, "x")])
def test_words_of_another_generation_change_nothing(event: Event) -> None:
    state = ready()
    assert play(event, state=state) == (state, [])


def test_close_ends_a_running_worker_and_stays_closed() -> None:
    state, effects = play(Close(), state=ready())
    assert End(1, 0) in effects
    state, effects = play(Acquire(), state=state)
    assert isinstance(effects[0], RefuseWaiters)
    state, effects = play(Exited(1, "exit 0"), state=state)
    assert state.phase is Phase.CLOSED
    assert not any(isinstance(effect, Spawn) for effect in effects)


def test_cooldown_is_capped() -> None:
    assert cooldown(1000, POLICY) == POLICY.cooldown_max_s


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.sampled_from([Acquire(), Release(), Unload(), Unload(True), *(Fired(timer) for timer in Timer)]),
    st.just(Close()),
)
GENERATION_EVENTS = ("progressed", "ready", "settled", "exited", "unresponsive")


@given(st.lists(st.one_of(EVENTS, st.sampled_from(GENERATION_EVENTS)), max_size=60))
def test_any_order_keeps_the_invariants(script: list[Event | str]) -> None:
    """One process at a time; never a spawn after close; timers of life only while there is a process."""
    state = State()
    alive = False
    for item in script:
        generation = state.generation
        if isinstance(item, str):
            if item == "exited" and not alive:
                continue
            named: dict[str, Event] = {
                "progressed": Progressed(generation),
                "ready": BecameReady(generation),
                "settled": Settled(generation),
                "exited": Exited(generation, "gone"),
                "unresponsive": Unresponsive(generation, "hung"),
            }
            event = named[item]
            if item == "exited":
                alive = False
        else:
            event = item
        closed = state.phase is Phase.CLOSED
        state, effects = step(state, event, POLICY)
        for effect in effects:
            if isinstance(effect, Spawn):
                assert not alive
                assert not closed
                alive = True
            if isinstance(effect, End):
                assert alive
                assert effect.generation == state.generation
        assert state.leases >= 0
        if state.phase in {Phase.STARTING, Phase.READY, Phase.DRAINING, Phase.STOPPING}:
            assert alive
        if state.phase in {Phase.STOPPED, Phase.COOLDOWN}:
            assert not alive
        if state.phase is Phase.DRAINING:
            assert state.leases > 0
