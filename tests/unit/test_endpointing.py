"""Where utterances begin and end, frame by frame, with probabilities made by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from shared.streams import Endpointing, OpenUtterance
from worker.audio.vad import FRAME
from worker.live.endpointing import TAIL_SAMPLES, Action, Begin, End, Endpointer, Pause, Speech

RULES = Endpointing()
SPEECH, SILENCE = 0.9, 0.02
SILENCE_FRAMES = 16
"""500 ms."""


def play(endpointer: Endpointer, *runs: tuple[float, int]) -> list[Action]:
    """So many frames of each probability; every sample of the stream has its own position as its value."""
    actions: list[Action] = []
    for probability, count in runs:
        for _ in range(count):
            start = endpointer.position
            frame = np.arange(start, start + FRAME, dtype=np.float32)
            actions += endpointer.push(frame, probability)
    return actions


def heard(actions: list[Action], utterance: int) -> np.ndarray:
    parts = [action.audio for action in actions if isinstance(action, Speech) and action.utterance == utterance]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions if not isinstance(action, Speech | Pause)]


def test_silence_begins_nothing() -> None:
    endpointer = Endpointer(RULES, 30)
    assert play(endpointer, (SILENCE, 2000)) == []
    assert endpointer.position - endpointer.needed_sample < 16_000, "silence is not kept"


def test_a_click_is_no_speech() -> None:
    assert play(Endpointer(RULES, 30), (SILENCE, 20), (SPEECH, 2), (SILENCE, 20)) == []


def test_an_utterance_has_its_preroll_and_its_tail() -> None:
    actions = play(Endpointer(RULES, 30), (SILENCE, 40), (SPEECH, 30), (SILENCE, 40))
    assert kinds(actions) == [Begin, End]
    begin, end = actions[0], actions[-1]
    assert isinstance(begin, Begin)
    assert isinstance(end, End)
    assert begin.start_sample == 40 * FRAME - 4_800
    assert end.end_sample == 70 * FRAME
    assert end.cause == "silence"
    assert end.spoken
    audio = heard(actions, 0)
    assert audio[0] == begin.start_sample
    assert audio[-1] + 1 == end.end_sample + TAIL_SAMPLES
    assert (np.diff(audio) == 1).all(), "no gap and nothing twice"


def test_a_dip_inside_a_word_ends_nothing() -> None:
    actions = play(Endpointer(RULES, 30), (SPEECH, 20), (0.4, 30), (SPEECH, 20), (SILENCE, 20))
    assert kinds(actions) == [Begin, End]


def test_a_pause_is_told_once_when_all_that_may_belong_to_the_utterance_is_out() -> None:
    endpointer = Endpointer(RULES, 30)
    actions = play(endpointer, (SPEECH, 20), (SILENCE, 10), (SPEECH, 5), (SILENCE, SILENCE_FRAMES))
    places = [n for n, action in enumerate(actions) if isinstance(action, Pause)]
    assert len(places) == 2
    for place, spoken in zip(places, (20, 35), strict=True):
        audio = heard(actions[:place], 0)
        assert audio[-1] + 1 == spoken * FRAME + TAIL_SAMPLES
    assert isinstance(actions[-1], End)
    assert not any(isinstance(action, Speech) for action in actions[places[-1] :]), "nothing new for the final"


def test_a_cough_is_not_worth_hearing_early() -> None:
    actions = play(Endpointer(RULES, 30), (SPEECH, 4), (SILENCE, SILENCE_FRAMES))
    assert not any(isinstance(action, Pause) for action in actions)


def test_quiet_is_held_back_until_it_is_a_pause_or_speech_goes_on() -> None:
    """An engine that heard half of it would be busy when the pause is told, and the final would wait."""
    endpointer = Endpointer(RULES, 30)
    play(endpointer, (SPEECH, 20))
    assert play(endpointer, (SILENCE, 6)) == []
    resumed = play(endpointer, (SPEECH, 1))
    assert heard(resumed, 0).tolist() == list(range(20 * FRAME, 27 * FRAME)), "all of it, before the word"
    assert play(endpointer, (SILENCE, 6)) == []
    assert [type(action) for action in play(endpointer, (SILENCE, 1))] == [Speech, Pause]


def test_a_pause_shorter_than_the_setting_ends_nothing() -> None:
    actions = play(Endpointer(RULES, 30), (SPEECH, 20), (SILENCE, SILENCE_FRAMES - 1), (SPEECH, 20), (SILENCE, 20))
    assert kinds(actions) == [Begin, End]
    end = actions[-1]
    assert isinstance(end, End)
    assert len(end.speech) == 2


def test_the_silence_setting_counts() -> None:
    quick = Endpointer(Endpointing(silence_ms=100), 30)
    assert kinds(play(quick, (SPEECH, 20), (SILENCE, 4))) == [Begin, End]


def test_too_little_speech_is_not_worth_a_decode() -> None:
    actions = play(Endpointer(RULES, 30), (SPEECH, 3), (SILENCE, 20))
    end = actions[-1]
    assert isinstance(end, End)
    assert not end.spoken


def test_manual_ends_only_when_asked() -> None:
    endpointer = Endpointer(Endpointing(automatic=False), 30)
    actions = play(endpointer, (SPEECH, 20), (SILENCE, 200))
    assert kinds(actions) == [Begin]
    assert kinds(endpointer.finish("request")) == [End]
    assert endpointer.finish("request") == []


def test_without_end_it_is_cut_at_the_longest_and_goes_on_without_a_gap() -> None:
    actions = play(Endpointer(RULES, 10), (SPEECH, 700))
    assert kinds(actions)[:4] == [Begin, End, Begin, End]
    ends = [action for action in actions if isinstance(action, End)]
    assert {end.cause for end in ends} == {"length"}
    first, second = heard(actions, 0), heard(actions, 1)
    assert len(first) <= 10 * 16_000 + FRAME
    assert first[-1] + 1 == second[0]


LIMIT_FRAMES = 313
"""10 s."""


def test_at_the_limit_it_is_cut_in_the_best_pause_of_what_was_held_back() -> None:
    """A longer dip, then a shorter one: the first that comes is not the best, nor is the last."""
    endpointer = Endpointer(RULES, 10)
    before = play(
        endpointer, (SPEECH, 284), (SILENCE, 1), (SPEECH, 5), (SILENCE, 2), (SPEECH, 5), (SILENCE, 1), (SPEECH, 5)
    )
    assert kinds(before) == [Begin], "nothing is decided before the limit"
    assert heard(before, 0)[-1] < 9 * 16_000, "nobody hears a word that may be the next one's"
    actions = before + play(endpointer, (SPEECH, 60), (SILENCE, 40))
    assert kinds(actions) == [Begin, End, Begin, End]
    cut, last = (action for action in actions if isinstance(action, End))
    middle = 291 * FRAME
    assert heard(actions, 0)[-1] + 1 == heard(actions, 1)[0] == middle
    assert (cut.cause, cut.end_sample, cut.through_sample) == ("length", 290 * FRAME, middle)
    assert cut.speech[-1] == (285 * FRAME, 290 * FRAME)
    assert last.speech == ((292 * FRAME, 297 * FRAME), (298 * FRAME, 363 * FRAME))


def test_without_a_pause_it_is_cut_where_it_is_quietest() -> None:
    endpointer = Endpointer(RULES, 10)
    rng = np.random.default_rng(3)
    audio = rng.normal(0, 0.1, 400 * FRAME).astype(np.float32)
    quiet = 294 * FRAME + 100
    audio[quiet : quiet + 1_600] *= 0.1
    actions = [action for frame in audio.reshape(-1, FRAME) for action in endpointer.push(frame, SPEECH)]
    cut = next(action for action in actions if isinstance(action, End))
    assert cut.end_sample == cut.through_sample == quiet + 800
    assert len(heard(actions, 0)) == quiet + 800
    assert np.array_equal(np.concatenate([heard(actions, 0), heard(actions, 1)]), audio), "no sample lost, none twice"


@given(st.integers(0, 40))
def test_what_is_held_back_is_handed_out_when_the_stream_ends(frames: int) -> None:
    endpointer = Endpointer(RULES, 10)
    actions = play(endpointer, (SPEECH, LIMIT_FRAMES - 35 + frames))
    actions += endpointer.finish("close")
    audio = np.concatenate([heard(actions, 0), heard(actions, 1)])
    assert np.array_equal(audio, np.arange(endpointer.position))


def test_an_utterance_ends_in_silence_although_its_last_words_are_held_back() -> None:
    endpointer = Endpointer(RULES, 10)
    actions = play(endpointer, (SPEECH, 300), (SILENCE, 40))
    assert kinds(actions) == [Begin, End]
    assert heard(actions, 0)[-1] + 1 >= 300 * FRAME


def test_late_in_an_utterance_a_short_pause_will_do() -> None:
    eight_seconds = 260
    early = play(Endpointer(RULES, 10), (SPEECH, 100), (SILENCE, 5), (SPEECH, 20))
    late = play(Endpointer(RULES, 10), (SPEECH, eight_seconds), (SILENCE, 5), (SPEECH, 20))
    assert kinds(early) == [Begin]
    assert kinds(late) == [Begin, End, Begin]


def test_the_preroll_of_a_resumed_utterance_is_no_silence_that_ends_it() -> None:
    """The worker died right after the start was announced; the pre-roll is longer than the silence that ends an utterance."""
    rules = Endpointing(prefix_ms=600, silence_ms=200)
    first = play(Endpointer(rules, 30), (SILENCE, 40), (SPEECH, 3))
    begin = first[0]
    assert isinstance(begin, Begin)
    known = OpenUtterance(0, begin.start_sample)
    again = Endpointer(rules, 30, begin.start_sample, 1, [known])
    before = (40 * FRAME - begin.start_sample) // FRAME
    actions = play(again, (SILENCE, before), (SPEECH, 20), (SILENCE, 20))
    assert kinds(actions) == [Begin, End]
    assert isinstance(actions[-1], End)
    assert actions[-1].spoken
    assert abs(actions[-1].end_sample - 60 * FRAME) < FRAME


def test_a_resumed_utterance_goes_on_unannounced() -> None:
    known = OpenUtterance(4, 1_600, "so far")
    endpointer = Endpointer(RULES, 30, base_sample=1_600, next_utterance=5, resumed=[known])
    actions = play(endpointer, (SPEECH, 10), (SILENCE, 20), (SPEECH, 10), (SILENCE, 20))
    begins = [action for action in actions if isinstance(action, Begin)]
    assert [(b.utterance, b.emitted, b.announced) for b in begins] == [(4, "so far", True), (5, "", False)]
    assert heard(actions, 4)[0] == 1_600


def test_an_announced_end_is_kept() -> None:
    known = OpenUtterance(0, 0, "", end_sample=20 * FRAME)
    actions = play(Endpointer(RULES, 30, resumed=[known], next_utterance=1), (SPEECH, 20), (SILENCE, 40))
    (end,) = [action for action in actions if isinstance(action, End)]
    assert (end.end_sample, end.announced) == (20 * FRAME, True)


def test_an_announced_end_has_its_cause() -> None:
    known = OpenUtterance(0, 0, "", 20 * FRAME, 20 * FRAME + 700, "request")
    for whole in (True, False):
        endpointer = Endpointer(RULES, 30, resumed=[known], next_utterance=1)
        assert endpointer.awaited_sample == 20 * FRAME + 700
        actions = play(endpointer, (SPEECH, 30 if whole else 21)) + endpointer.finish("close")
        assert [action.cause for action in actions if isinstance(action, End)] == ["request", "close"][: 1 + whole]
        assert endpointer.awaited_sample == -1


def test_nothing_begins_in_what_was_cleared_but_what_was_owed_is_heard() -> None:
    """An utterance has ended and has no final yet; speech behind it was cleared; its audio comes again for its sake."""
    known = OpenUtterance(0, 0, "", 20 * FRAME, 22 * FRAME)
    endpointer = Endpointer(RULES, 30, resumed=[known], next_utterance=2, floor_sample=60 * FRAME)
    actions = play(endpointer, (SPEECH, 20), (SILENCE, 10), (SPEECH, 10))
    assert endpointer.needed_sample <= endpointer.position, "nobody can want what has not come"
    actions += play(endpointer, (SPEECH, 60), (SILENCE, 20))
    assert heard(actions, 0).tolist() == list(range(22 * FRAME))
    assert heard(actions, 2)[0] == 60 * FRAME
    assert kinds(actions) == [Begin, End, Begin, End]


def test_the_last_frame_before_an_end_that_was_asked_for_ends_nothing_itself() -> None:
    at_limit = Endpointer(RULES, 10)
    play(at_limit, (SPEECH, LIMIT_FRAMES - 1))
    assert kinds(at_limit.push(np.zeros(300, np.float32), SPEECH, last=True)) == []
    (end,) = (action for action in at_limit.finish("request") if isinstance(action, End))
    assert (end.utterance, end.cause) == (0, "request")
    assert at_limit.finish("request") == []


def test_a_resumed_utterance_leaves_the_next_one_its_beginning() -> None:
    """Late in an utterance a pause of three frames ends it, and the next one begins within what would be its tail."""
    sound = (SPEECH, 300), (SILENCE, 3), (SPEECH, 20), (SILENCE, 20)
    actions = play(Endpointer(RULES, 10), *sound)
    assert kinds(actions) == [Begin, End, Begin, End]
    ended = next(action for action in actions if isinstance(action, End))
    first = OpenUtterance(0, int(heard(actions, 0)[0]), "", ended.end_sample, ended.through_sample)
    second = OpenUtterance(1, int(heard(actions, 1)[0]))
    assert second.start_sample - first.end_sample < TAIL_SAMPLES
    for known in [first, second], [first]:
        again = play(Endpointer(RULES, 10, next_utterance=len(known), resumed=known), *sound)
        assert kinds(again) == [Begin, End, Begin, End]
        for number in (0, 1):
            assert np.array_equal(heard(again, number), heard(actions, number))


def test_one_that_was_open_is_unfinished_before_it_is_gone_on_with() -> None:
    known = [OpenUtterance(0, 0, "", 16_000, 16_000), OpenUtterance(1, 16_200)]
    endpointer = Endpointer(RULES, 10, next_utterance=2, resumed=known)
    play(endpointer, (SPEECH, 32))
    assert not endpointer.open
    assert endpointer.unfinished
    assert kinds(endpointer.finish("stall")) == [Begin, End]
    assert not endpointer.unfinished


def test_clear_forgets_the_open_utterance() -> None:
    endpointer = Endpointer(RULES, 30)
    play(endpointer, (SPEECH, 20))
    assert endpointer.clear() == 0
    assert endpointer.clear() == -1
    assert kinds(play(endpointer, (SILENCE, 20))) == []
    later = play(endpointer, (SPEECH, 5))
    assert isinstance(later[0], Begin)
    assert later[0].utterance == 1


RUNS = st.lists(st.tuples(st.sampled_from([SPEECH, SILENCE, 0.4]), st.integers(1, 120)), max_size=12)


@example([(SILENCE, 400), (SPEECH, 120)], True, 500, 9_500)  # begun so early that its limit is near
@example([(SPEECH, 313)], False, 100, 0)  # the stream ends where an utterance is cut for its length
@given(RUNS, st.booleans(), st.sampled_from([100, 500, 1500]), st.sampled_from([0, 300, 900, 9_500]))
def test_any_speech_keeps_the_promises(
    runs: list[tuple[float, int]], automatic: bool, silence_ms: int, prefix_ms: int
) -> None:
    endpointer = Endpointer(Endpointing(automatic, 0.5, prefix_ms, silence_ms), 10)
    actions = play(endpointer, *runs) + endpointer.finish("close")
    assert kinds(actions) == [Begin, End] * (len(kinds(actions)) // 2), "they alternate"
    starts = [action.start_sample for action in actions if isinstance(action, Begin)]
    last = 0.0
    for number, end in enumerate(action for action in actions if isinstance(action, End)):
        audio = heard(actions, number)
        assert end.utterance == number
        assert len(audio)
        assert (np.diff(audio) == 1).all(), "no gap and nothing twice"
        assert audio[0] == starts[number]
        assert audio[0] >= last, "no sample in two utterances"
        last = audio[-1] + 1
        assert len(audio) <= 10 * 16_000 + TAIL_SAMPLES + FRAME
        assert all(begin < stop <= end.end_sample for begin, stop in end.speech)
