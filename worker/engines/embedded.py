"""Moonshine tiny-en on the CPU: the engine that needs no download, because the model lies inside its package.

``moonshine-voice`` 0.0.73 brings a native library with its own ONNX Runtime and 43 MB of weights. Its C interface is called
here directly: the package's Python class turns every sample into a Python float and back under the interpreter lock (45 ms
for 10 s of audio), and importing it imports an HTTP client (0.2 s of a cold start).

English only. The library decodes one segment in one blocking call without the interpreter lock and shows no tokens, so a
step is a whole decode, and segments stay short. It loses itself now and then ("the first is the first is …") and hears music
in noise; both are cleaned away here. Its own VAD is off, since it cuts words: only speech may be fed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import numpy as np

from shared.errors import EngineFailed, ModelLoadFailed, NapscribeError
from shared.messages import Capabilities
from shared.pcm import SAMPLE_RATE, samples
from worker.audio.samples import Audio
from worker.cores import usable_cores
from worker.engines.base import (
    BufferedSequence,
    EngineEvent,
    EngineSequence,
    Final,
    Hypothesis,
    Report,
    SequenceFailed,
    SequenceRequest,
)
from worker.text.repetition import collapse_repetitions, collapse_word_runs

MODEL_ID = "moonshine-tiny-en"
MAX_SEGMENT_S = 10.0
MAX_AUDIO_S = 30.0
"""More in one sequence is refused: time and memory of a decode grow faster than its audio, and a step must end."""
MAX_STEP_S = 30.0
"""10 s of speech take 0.2 to 0.7 s; the rest is for a machine that is busy with something else."""

HYPOTHESIS_S = 0.32
"""New audio before a hypothesis is worth a decode …"""
FIRST_SPEECH_S = 0.48
"""The first one waits longer, for so much speech. Of less the model makes words up ("You.")."""
FIRST_HYPOTHESIS_S = 0.8
"""It does not wait longer than this, pre-roll included, wherever speech seems to begin."""
LOUD = 0.05
"""Share of the loudest 20 ms so far from which sound counts as speech, for the first hypothesis only."""
_LEVEL_FRAME = SAMPLE_RATE // 50
HYPOTHESIS_DECODES = 3
"""… and at least this many times what the last decode took, so that one stream leaves time for others."""
STREAMS_PER_DECODER = 3
"""At that pace a stream takes at most a third of a decoder."""
MAX_DECODERS = 4
"""Each costs 90 MB."""

SHORTEST = samples(0.1)
"""Less holds no word; the network itself fails under 1024 samples."""
FAINTEST = 1e-4
"""Peak of audio that is nothing but rounding noise (-80 dBFS, three steps of 16 bits). Quiet speech is never made louder:
the network hears it as well at -50 dBFS as at full scale, and the VAD in front finds no speech below that."""

_HOP = 1600
"""Samples that the library takes at a time, and drops at the end if they are fewer: audio is padded to a multiple. Its own
512 cost 50 ms in 10 s, because it copies all audio for each."""
_TOKENS_PER_S = 13
"""Budget of the library's decode loop. Its 6.5 cuts short answers ("It" for "It's just") and fast talkers."""
_OPTIONS = {
    "vad_threshold": "0.0",
    "vad_hop_size": str(_HOP),
    "max_tokens_per_second": str(_TOKENS_PER_S),
    "return_audio_data": "false",
}
_HINT = "pip install 'napscribe[embedded]', or set NAPSCRIBE_MODEL to another model."


@dataclass(slots=True)
class EmbeddedSequence(BufferedSequence):
    text: str = ""
    """What the last decode heard."""
    repeated: bool = False
    """Whether a run-away was cut out of it."""
    pace: int = samples(FIRST_HYPOTHESIS_S)
    """Samples of new audio before the next hypothesis."""
    closed: bool = False

    @property
    def ready(self) -> bool:
        if self.closed or self.finished:
            return not self.closed
        new = self.length - self.decoded
        return new > 0 if self.paused else self.request.partials and new >= self.pace


class EmbeddedEngine:
    """Takes up to ``decoders`` rows a step, each on a thread and a copy of the model of its own, loaded when first needed.

    ``threads`` is the most CPU threads to use; 0 takes half of the cores that the process may use. ONNX Runtime's own
    threads are off: they spend twice the CPU time on the same decode, waiting for each other, and save little of its length
    (nothing for short segments, up to a third for eleven seconds of speech).
    """

    def __init__(self, *, threads: int = 0) -> None:
        self._cores = usable_cores()
        self._limit = min(MAX_DECODERS, threads or max(1, self._cores // 2))
        self._decoders: list[_Decoder] = []
        self._pool: ThreadPoolExecutor | None = None

    @property
    def device_memory(self) -> int:
        return 0

    def load(self, report: Report) -> Capabilities:
        """Raises ModelLoadFailed."""
        report("loading", 0.0)
        self._decoders.append(_Decoder())
        report("warming", 0.0)
        # A tenth of a second of noise: it shows that the model works, and makes the first job 20 ms faster for 35 ms.
        # Longer audio warms nothing more, since the library keeps no memory between calls.
        self._decoders[0].decode(np.random.default_rng(0).normal(0, 0.1, SHORTEST).astype(np.float32))
        report("warming", 1.0)
        return Capabilities(
            engine="embedded",
            model=MODEL_ID,
            languages=("en",),
            max_live=2 if self._cores == 1 else STREAMS_PER_DECODER * self._limit,
            max_batch=self._limit,
            accepts_prefix=False,
            streams_natively=False,
            translates=False,
            word_times="estimated",
            max_segment_s=MAX_SEGMENT_S,
            max_step_s=MAX_STEP_S,
        )

    def open(self, request: SequenceRequest) -> EmbeddedSequence:
        return EmbeddedSequence(request)

    def feed(self, sequence: EngineSequence, audio: Audio) -> None:
        row = _own(sequence)
        if row.closed or row.finished:
            raise ValueError("Audio came after the end of its sequence.")
        row.append(audio)
        if row.request.partials and not row.decoded and row.length <= samples(FIRST_HYPOTHESIS_S):
            row.pace = _first_pace(row.audio())

    def finish(self, sequence: EngineSequence) -> None:
        _own(sequence).finished = True

    def freeze(self, sequence: EngineSequence, text: str) -> None:
        """Not for this engine: it takes no prefix."""

    def pause(self, sequence: EngineSequence) -> None:
        _own(sequence).paused = True

    def suspend(self, sequence: EngineSequence) -> None:
        """Nothing is held between steps."""

    def cancel(self, sequence: EngineSequence) -> None:
        _close(_own(sequence))

    def step(self, rows: Sequence[EngineSequence], deadline_ns: int) -> list[EngineEvent]:
        """Decode the first ready rows, as many as there are decoders, but none of a lower lane than the first: it would
        hold up the first one's answer."""
        ready = [row for row in map(_own, rows) if row.ready]
        taken = list(takewhile(lambda row: row.request.lane == ready[0].request.lane, ready))[: self._limit]
        if not taken:
            return []
        self._provide(len(taken))
        jobs = list(zip(self._decoders, taken, strict=False))
        others = [self._threads().submit(_advance, *job) for job in jobs[1:]]
        events = [_advance(*jobs[0]), *(other.result() for other in others)]
        return [event for event in events if event is not None]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        while self._decoders:
            self._decoders.pop().close()

    def _provide(self, count: int) -> None:
        if not self._decoders:
            raise EngineFailed("The engine is not loaded.")
        while len(self._decoders) < count:
            self._decoders.append(_Decoder())

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._limit - 1, thread_name_prefix="moonshine")
        return self._pool


def _own(sequence: EngineSequence) -> EmbeddedSequence:
    if not isinstance(sequence, EmbeddedSequence):
        raise TypeError(f"A sequence of another engine: {type(sequence).__name__}.")
    return sequence


def _close(row: EmbeddedSequence) -> None:
    row.closed = True
    row.chunks.clear()


def _first_pace(audio: Audio) -> int:
    """Samples that the first hypothesis needs: half a second from where it becomes loud, which pre-roll may or may not be."""
    level = np.sqrt((audio[: len(audio) // _LEVEL_FRAME * _LEVEL_FRAME].reshape(-1, _LEVEL_FRAME) ** 2).mean(axis=1))
    onset = int(np.argmax(level > LOUD * level.max())) * _LEVEL_FRAME if len(level) else 0
    return min(samples(FIRST_HYPOTHESIS_S), onset + samples(FIRST_SPEECH_S))


def _advance(decoder: _Decoder, row: EmbeddedSequence) -> EngineEvent | None:
    """One decode of everything that the row has heard."""
    try:
        if row.decoded != row.length:
            _hear(decoder, row)
    except Exception as error:
        _close(row)
        typed = error if isinstance(error, NapscribeError) else EngineFailed(f"Moonshine failed: {error!r}.")
        return SequenceFailed(row, typed)
    if not row.finished:
        return Hypothesis(row, row.text) if row.request.partials else None
    _close(row)
    return Final(row, row.text, language="en", finish_reason="repetition" if row.repeated else "stop")


def _hear(decoder: _Decoder, row: EmbeddedSequence) -> None:
    began = time.monotonic_ns()
    row.text, row.repeated = _clean(_recognise(decoder, row.audio()))
    row.decoded = row.length
    took = (time.monotonic_ns() - began) / 1e9
    row.pace = samples(max(HYPOTHESIS_S, HYPOTHESIS_DECODES * took))


def _recognise(decoder: _Decoder, audio: Audio) -> str:
    if len(audio) < SHORTEST:
        return ""
    if len(audio) > MAX_AUDIO_S * SAMPLE_RATE:
        raise EngineFailed(f"A segment of {len(audio) / SAMPLE_RATE:.1f} s is longer than {MAX_AUDIO_S:.0f} s.")
    peak = float(max(audio.max(), -audio.min()))
    if not np.isfinite(peak):
        raise EngineFailed("The audio holds values that are not numbers.")
    if peak < FAINTEST:
        return ""
    return decoder.decode(audio / np.float32(peak) if peak > 1 else audio)


def _clean(text: str) -> tuple[str, bool]:
    """Text without the notes that stand for music and without run-aways; whether there were any of those."""
    text = " ".join(text.replace("♪", " ").split())
    if not any(char.isalnum() for char in text):
        return "", False
    cleaned = collapse_repetitions(collapse_word_runs(text))
    return cleaned, cleaned != text


# ---------------------------------------------------------------- the library

_ABI = 20000
"""Version of the C interface that the structures below describe, as ``moonshine_get_version`` gives it."""
_TINY = 0
"""Architecture of the model."""


class _Option(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


class _Line(ctypes.Structure):
    """A line of a transcript; only its text is of use here."""

    _fields_ = (("text", ctypes.c_char_p), ("_rest", ctypes.c_byte * 80))


class _Transcript(ctypes.Structure):
    _fields_ = (("lines", ctypes.POINTER(_Line)), ("count", ctypes.c_uint64))


class _Decoder:
    """One copy of the model. Raises ModelLoadFailed. One call at a time."""

    def __init__(self) -> None:
        self._library, model = _library()
        os.environ["MOONSHINE_ORT_SINGLE_THREAD"] = "1"  # read by the library whenever it loads a model
        options = (_Option * len(_OPTIONS))(
            *(_Option(name.encode(), value.encode()) for name, value in _OPTIONS.items())
        )
        self._handle: int = self._library.moonshine_load_transcriber_from_files(
            os.fsencode(model), _TINY, options, len(options), _ABI
        )
        if self._handle < 0:
            raise ModelLoadFailed(f"Moonshine cannot load {model}: {self._reason(self._handle)}.", hint=_HINT)

    def decode(self, audio: Audio) -> str:
        """Text of speech, shape ``(samples,)`` at 16 kHz, at least ``SHORTEST``. Raises EngineFailed."""
        padded = np.zeros(-(-len(audio) // _HOP) * _HOP, np.float32)
        padded[: len(audio)] = audio
        transcript = ctypes.POINTER(_Transcript)()
        pointer = padded.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        code = self._library.moonshine_transcribe_without_streaming(
            self._handle, pointer, len(padded), SAMPLE_RATE, 0, ctypes.byref(transcript)
        )
        if code:
            raise EngineFailed(f"Moonshine failed on {len(audio) / SAMPLE_RATE:.2f} s of audio: {self._reason(code)}.")
        lines = transcript.contents.lines[: transcript.contents.count]  # the library's memory until its next call
        return " ".join((line.text or b"").decode("utf-8", "replace") for line in lines)

    def close(self) -> None:
        self._library.moonshine_free_transcriber(self._handle)

    def _reason(self, code: int) -> str:
        text: bytes | None = self._library.moonshine_error_to_string(code)
        return text.decode("utf-8", "replace") if text else f"code {code}"


@cache
def _library() -> tuple[ctypes.CDLL, Path]:
    """The native library and the folder of the model in the package. Raises ModelLoadFailed."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or spec.origin is None:
        raise ModelLoadFailed("The embedded model is not installed (package moonshine-voice).", hint=_HINT)
    package = Path(spec.origin).parent
    model = package / "assets" / "tiny-en"
    if not model.is_dir():
        raise ModelLoadFailed("This version of moonshine-voice does not bring its model.", hint=_HINT)
    try:
        library = ctypes.CDLL(str(package / "libmoonshine.so"))
        version = library.moonshine_get_version()
    except (OSError, AttributeError) as error:
        raise ModelLoadFailed(f"Moonshine's library does not load on this machine: {error}.", hint=_HINT) from error
    if version != _ABI or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise ModelLoadFailed(f"Version {version} of Moonshine's library is not the one that is needed.", hint=_HINT)
    _declare(library)
    return library, model


def _declare(library: ctypes.CDLL) -> None:
    """Types of the functions that are called."""
    library.moonshine_load_transcriber_from_files.argtypes = (
        ctypes.c_char_p,
        ctypes.c_uint32,
        ctypes.POINTER(_Option),
        ctypes.c_uint64,
        ctypes.c_int32,
    )
    library.moonshine_transcribe_without_streaming.argtypes = (
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.POINTER(_Transcript)),
    )
    library.moonshine_free_transcriber.argtypes = (ctypes.c_int32,)
    library.moonshine_free_transcriber.restype = None
    library.moonshine_error_to_string.argtypes = (ctypes.c_int32,)
    library.moonshine_error_to_string.restype = ctypes.c_char_p
