"""Reading files in a process of its own, for an engine that is faster than threads of one interpreter can hear.

Decoder, resampler and VAD let go of the interpreter while they work, but what stands between them does not: with an engine
beside them on a GPU, eight threads hear no more than one, and the engine waits for each of them. So every audio thread has a child
that reads for it.
The two speak one question and its answer at a time.

A child that dies (a decoder that a file makes crash, or the kernel out of memory) is replaced, and its files go on where their
last segment ended. A file that ends its reader twice without a segment between fails alone.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import Any

import msgspec
import numpy as np

from shared.errors import EngineFailed, NapscribeError, WorkerCrashed, from_code
from shared.journal import log
from shared.messages import TranscribeFile
from worker.child import NoChild, begin, receive, send, start
from worker.files.reader import FileReader, Heard, ReadersGone
from worker.files.segments import Segment, SegmentPolicy

STRETCH_SAMPLES = 8 * 16_000
"""A child goes on until it has a segment, or has heard this much: a question costs as much as hearing a tenth of a second."""

MAX_DEATHS = 2
"""Of a file's readers, without a segment between them."""


# ---------------------------------------------------------------- what they say to each other


class _Open(msgspec.Struct, tag=True, array_like=True):
    number: int
    command: TranscribeFile


class _Advance(msgspec.Struct, tag=True, array_like=True):
    number: int


class _Close(msgspec.Struct, tag=True, array_like=True):
    number: int


class _Segment(msgspec.Struct, array_like=True):
    index: int
    audio: memoryview
    """Float32 samples."""
    start_sample: int
    speech_end_sample: int
    end_sample: int
    speech: tuple[tuple[int, int], ...]


class _Answer(msgspec.Struct, array_like=True):
    segments: list[_Segment] = []
    samples: int = 0
    over: bool = False
    decode_ns: int = 0
    vad_ns: int = 0
    failure: tuple[str, str, str, str | None] | None = None
    """Code, message, hint and parameter of an error."""


_Question = _Open | _Advance | _Close
_encode = msgspec.msgpack.Encoder().encode
_policy_of = msgspec.msgpack.Decoder(SegmentPolicy).decode
_question_of = msgspec.msgpack.Decoder(_Question).decode
_answer_of = msgspec.msgpack.Decoder(_Answer).decode


# ---------------------------------------------------------------- the worker's side


class ReaderProcess:
    """``Readers`` in a child. For one thread; a child ends with the thread that started it."""

    def __init__(self, policy: SegmentPolicy) -> None:
        """Raises NoChild if there can be no child."""
        self._policy = policy
        self._numbers = 0
        self._line: socket.socket | None = None
        self._child = self._start()
        self.deaths = 0
        """Of children so far. A file that was opened before the last of them must be opened anew."""

    @property
    def pid(self) -> int:
        """Of the child that there is, or was last."""
        return self._child.pid

    def open(self, command: TranscribeFile) -> RemoteReader:
        self._numbers += 1
        reader = RemoteReader(self, self._numbers, command)
        reader.open()
        return reader

    def ask(self, question: _Question) -> _Answer:
        """Raises the error that the answer is; ConnectionError if the child died of the question; NoChild if there is none, and
        none can be started."""
        if self._line is None:
            self._child = self._start()
        assert self._line is not None
        try:
            send(self._line, _encode(question))
            answer = _answer_of(receive(self._line))
        except ConnectionError:
            self._bury()
            raise
        if answer.failure is not None:
            code, message, hint, param = answer.failure
            raise from_code(code, message, hint=hint, param=param)
        return answer

    def close(self) -> None:
        """End the child."""
        if self._line is not None:
            self._line.close()
            self._line = None
        self._child.wait()

    def _bury(self) -> None:
        self.close()
        self.deaths += 1
        log("a reader died", level="error", reader=self._child.pid, exit=self._child.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        """A child that is ready to read, at the other end of ``_line``. Raises NoChild."""
        child, self._line = start(__name__, _encode(self._policy))
        return child


class RemoteReader:
    """A file in the hands of a child, and what it takes to go on with another child."""

    def __init__(self, process: ReaderProcess, number: int, command: TranscribeFile) -> None:
        self._process = process
        self._number = number
        self._command = command
        self._samples = 0
        self._opened_after = -1
        """Deaths before the child that has it."""
        self._deaths = 0

    @property
    def _open(self) -> bool:
        return self._opened_after == self._process.deaths

    def open(self) -> None:
        """It is open afterwards, unless the child died of it."""
        deaths = self._process.deaths
        if self._ask(_Open(self._number, self._command)) is not None:
            self._opened_after = deaths

    def advance(self) -> Heard:
        if not self._open:
            self.open()
        answer = self._ask(_Advance(self._number)) if self._open else None
        if answer is None:
            return Heard([], self._samples, over=False, decode_ns=0, vad_ns=0)
        segments = [_heard(segment) for segment in answer.segments]
        if segments:
            base, index = segments[-1].end_sample, segments[-1].index + 1
            self._command = msgspec.structs.replace(self._command, base_sample=base, next_index=index)
            self._deaths = 0
        self._samples = answer.samples
        return Heard(segments, answer.samples, answer.over, answer.decode_ns, answer.vad_ns)

    def close(self) -> None:
        if self._open:
            with contextlib.suppress(ConnectionError, NoChild):
                self._process.ask(_Close(self._number))

    def _ask(self, question: _Question) -> _Answer | None:
        """None if the child died of it, which a file may cause once between two segments. Raises ReadersGone where no other can
        be started."""
        try:
            return self._process.ask(question)
        except ConnectionError:
            self._deaths += 1
            if self._deaths < MAX_DEATHS:
                return None
            raise WorkerCrashed(
                f"This file ended its reader {self._deaths} times.",
                hint="Convert it to wav or flac; please report the file if you can share it.",
            ) from None
        except NoChild as error:
            raise ReadersGone(str(error)) from error


def _heard(segment: _Segment) -> Segment:
    audio = np.frombuffer(segment.audio, np.float32)
    return Segment(
        segment.index, audio, segment.start_sample, segment.speech_end_sample, segment.end_sample, segment.speech
    )


# ---------------------------------------------------------------- the child's side


class _Child:
    def __init__(self, policy: SegmentPolicy) -> None:
        from worker.audio.vad import load_vad

        self._vad = load_vad()
        self._policy = policy
        self._readers: dict[int, FileReader] = {}

    def answer(self, question: _Question) -> _Answer:
        try:
            match question:
                case _Open(number=number, command=command):
                    self._readers[number] = FileReader(self._vad, self._policy, command)
                case _Close(number=number):
                    self._forget(number)
                case _Advance(number=number):
                    return self._stretch(number)
        except NapscribeError as error:
            return self._failed(question.number, error)
        except Exception as error:
            log("reading failed", level="error", error=repr(error))
            return self._failed(question.number, EngineFailed(f"Reading the audio failed: {type(error).__name__}."))
        return _Answer()

    def _stretch(self, number: int) -> _Answer:
        reader = self._readers[number]
        heard = reader.advance()
        began, decode_ns, vad_ns = heard.samples, heard.decode_ns, heard.vad_ns
        while not heard.segments and not heard.over and heard.samples - began < STRETCH_SAMPLES:
            heard = reader.advance()
            decode_ns, vad_ns = decode_ns + heard.decode_ns, vad_ns + heard.vad_ns
        if heard.over:
            self._forget(number)
        return _Answer([_told(segment) for segment in heard.segments], heard.samples, heard.over, decode_ns, vad_ns)

    def _failed(self, number: int, error: NapscribeError) -> _Answer:
        self._forget(number)
        return _Answer(failure=(error.code, error.message, error.hint, error.param))

    def _forget(self, number: int) -> None:
        reader = self._readers.pop(number, None)
        if reader is not None:
            reader.close()


def _told(segment: Segment) -> _Segment:
    audio: Any = np.ascontiguousarray(segment.audio)
    return _Segment(
        segment.index,
        memoryview(audio).cast("B"),
        segment.start_sample,
        segment.speech_end_sample,
        segment.end_sample,
        segment.speech,
    )


def main() -> None:
    """Until the worker closes its end, or is gone."""
    with begin("reader") as line, contextlib.suppress(ConnectionError):
        child = _Child(_policy_of(receive(line)))
        send(line, _encode(_Answer()))
        while True:
            send(line, _encode(child.answer(_question_of(receive(line)))))


if __name__ == "__main__":
    main()
