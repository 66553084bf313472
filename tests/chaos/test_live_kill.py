"""A call survives the death of its worker, wherever it strikes: same words, no event twice, times that only grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from gateway.app import Gateway
from gateway.life.lifecycle import Phase
from shared.streams import AudioCleared, Partial, SpeechStarted, SpeechStopped, UtteranceDelta, UtteranceFinal
from tests.chaos.conftest import Call, open_call
from tests.speech import clip, join, transcripts, without_pauses, word_errors

CLIPS = ("librivox-0880", "librivox-0930", "librivox-0890")
SAID = " ".join(transcripts()[name] for name in CLIPS)
PACE = 1.5


def script() -> bytes:
    """Three sentences with a second between them, s16le."""
    audio = join([clip(name) for name in CLIPS], [0.3, 1.0, 1.0])
    return (np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()


async def call_with(running: Gateway, *kills: Callable[[Call], bool]) -> Call:
    """Play the script; the worker is killed at the first moment at which each condition in turn holds."""
    call, listening = open_call(running)
    playing = asyncio.ensure_future(call.play(script(), pace=PACE))
    for condition in kills:
        await call.until(lambda condition=condition: condition(call), "the moment to kill")  # type: ignore[misc]
        assert call.kill_worker(), "no worker to kill"
    await playing
    call.stream.finish()
    async with asyncio.timeout(40):
        await listening
    call.check()
    return call


def errors(call: Call) -> int:
    return word_errors(SAID, call.text)


def count(call: Call, kind: type) -> int:
    return sum(isinstance(event, kind) for event in call.events)


def ready(call: Call) -> bool:
    return call.gateway.supervisor.phase is Phase.READY and bool(call.stream.generation)


MOMENTS: dict[str, Callable[[Call], bool]] = {
    "in speech": lambda call: ready(call) and count(call, SpeechStarted) == 1 and call.sent_s > 1.5,
    "in silence": lambda call: ready(call) and count(call, UtteranceFinal) == 1 and call.sent_s > 4.1,
    "right after a delta": lambda call: ready(call) and count(call, UtteranceDelta) >= 1,
    "right before a final": lambda call: count(call, SpeechStopped) == 1,
    "while spawning": lambda call: (
        call.gateway.supervisor.phase is Phase.STARTING and call.gateway.supervisor.report()["pid"] is not None
    ),
}


async def test_nobody_dies(running: Gateway) -> None:
    call = await call_with(running)
    assert errors(call) <= 3
    assert len(call.finals) >= 3


@pytest.mark.parametrize("moment", MOMENTS)
async def test_one_death(running: Gateway, moment: str) -> None:
    call = await call_with(running, MOMENTS[moment])
    assert errors(call) <= 5, call.text
    assert call.stream.restarts == (0 if moment == "while spawning" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [(1.0, 3.0, 5.5, 8.0, 11.0), (1.0,) * 5], ids=["spread", "each at its first word"])
async def test_five_deaths_in_one_call(running: Gateway, seconds: tuple[float, ...]) -> None:
    """Each at the first moment after its second of audio at which something has been heard from the worker of that moment."""
    heard = generation = 0

    def at(second: float) -> Callable[[Call], bool]:
        def now(call: Call) -> bool:
            nonlocal heard, generation
            words = count(call, Partial) + count(call, UtteranceFinal)
            if call.stream.generation != generation:
                generation, heard = call.stream.generation, words
            return ready(call) and call.sent_s > second and words > heard

        return now

    call = await call_with(running, *map(at, seconds))
    assert call.kills == 5
    assert errors(call) <= 8, call.text


@pytest.mark.slow
async def test_five_deaths_before_a_word(running: Gateway) -> None:
    """Each worker dies as soon as it has the call in hand: none comes further than the one before."""
    generations: set[int] = set()

    def has_it(call: Call) -> bool:
        generation = call.stream.generation
        in_hand = ready(call) and call.stream.id in call.gateway.supervisor.suspects(generation)
        fresh = in_hand and call.sent_s > 1.0 and generation not in generations
        generations.update({call.stream.generation} if fresh else ())
        return fresh

    call = await call_with(running, *[has_it] * 5)
    assert call.kills == 5
    assert errors(call) <= 5, call.text


SLOW = "scripted:word_ms=40,words=100,segment_s=10,step_ms=400"
"""A word every 40 ms, and finals that are late."""


@pytest.mark.parametrize("base", [{"NAPSCRIBE_MODEL": SLOW}], indirect=True)
async def test_a_death_after_a_clear_costs_nothing_that_was_said_before(running: Gateway) -> None:
    """Speech that is cut for its length, the rest of it cleared while the final of the first part is on its way, and the worker dies."""
    call, listening = open_call(running)
    audio = without_pauses(join([clip(name) for name in CLIPS] * 2, [0.0]))
    sound = (np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()
    await call.until(lambda: ready(call), "a worker")
    await call.play(sound[: round(10.3 * 32_000)], pace=20)
    await call.until(lambda: count(call, SpeechStopped) == 1, "a cut")
    call.stream.clear()
    await call.until(lambda: count(call, AudioCleared) == 1, "the answer to clear")
    assert not call.finals, "it came too early for this test"
    assert call.kill_worker()
    await call.play(sound[: (3 * 32_000)], pace=20)
    call.stream.finish()
    await asyncio.wait_for(listening, 40)
    first, last = call.finals
    cleared = next(event for event in call.events if isinstance(event, AudioCleared))
    assert first.start_sample < first.end_sample < cleared.through_sample <= last.start_sample
    assert (first.cause, last.cause) == ("length", "close")
    for final in call.finals:
        assert abs(len(final.text.split()) - (final.end_sample - final.start_sample) / (0.04 * 16_000)) <= 6, final.text


async def test_cold_call_has_its_first_word(running: Gateway) -> None:
    """Audio comes from the first moment; the worker is not there yet."""
    call, listening = open_call(running)
    audio = (clip("librivox-0880") * 32767).astype("<i2").tobytes()
    await call.play(audio, pace=3)
    call.stream.finish()
    await asyncio.wait_for(listening, 30)
    assert call.text.lower().startswith("he was not")
    assert call.text.lower().rstrip(".,").endswith("young man")


@pytest.mark.parametrize("base", [{"NAPSCRIBE_IDLE_SECONDS": "0.5"}], indirect=True)
async def test_a_silent_socket_parks_and_speech_wakes_it(running: Gateway) -> None:
    call, listening = open_call(running)
    audio = (clip("librivox-0930") * 32767).astype("<i2").tobytes()
    for generation in (1, 2):
        await call.play(audio + bytes(32_000 * 1), pace=2)
        await call.until(lambda g=generation: len(call.finals) == g, "final")  # type: ignore[misc]
        await call.until(lambda: running.supervisor.phase is Phase.STOPPED, "the worker sleeps")
        assert running.hub.report()["parked"] == 1
    call.stream.finish()
    await asyncio.wait_for(listening, 30)
    call.check()
    assert word_errors(" ".join([transcripts()["librivox-0930"]] * 2), call.text) <= 2
    assert running.supervisor.report()["generation"] == 2


BESIDE_A_GPU = "scripted:hears=clock,device=none:0"
"""It says so; ears and readers then have processes of their own."""


@pytest.mark.parametrize("base", [{"NAPSCRIBE_MODEL": BESIDE_A_GPU}], indirect=True)
async def test_the_death_of_the_ears_is_that_of_their_worker(running: Gateway) -> None:
    """Beside a GPU they are a process of their own; what they held is heard again."""
    undisturbed = await call_with(running)
    call, listening = open_call(running)
    playing = asyncio.ensure_future(call.play(script(), pace=PACE))
    await call.until(lambda: MOMENTS["right after a delta"](call), "the moment to kill")
    pid = running.supervisor.report()["pid"]
    assert isinstance(pid, int)
    (ears,) = (child for child in psutil.Process(pid).children() if "worker.live.ears_process" in child.cmdline())
    ears.kill()
    await playing
    call.stream.finish()
    await asyncio.wait_for(listening, 40)
    call.check()
    assert call.stream.restarts == 1
    assert call.finals[0].text == undisturbed.finals[0].text
    # Behind the death frames lie elsewhere, so an utterance may begin a word of the clock later.
    assert word_errors(undisturbed.text, call.text) <= 2
    assert running.supervisor.report()["generation"] == 2
