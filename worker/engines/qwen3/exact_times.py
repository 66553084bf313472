"""Exact word times of complete texts: the forced aligner, loaded in the background when the first text asks for it.

Loading (a download perhaps, the imports of transformers, gigabytes to the device) must not stop a step of the engine, which calls
wait for and which is watched for hanging. So files whose text is complete wait for it outside of steps, up to
``PATIENCE_S``; calls do not wait at all. Who cannot have exact times has estimated ones, which are marked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.errors import ModelLoadFailed, NapscribeError, Unsupported
from shared.journal import log
from shared.messages import Lane, Word
from worker.engines.qwen3.aligner import LANGUAGES, ForcedAligner
from worker.engines.qwen3.device import Device
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.words import prepare

PATIENCE_S = 60.0
"""So long files wait for the aligner; a download may take longer."""
RETRY_S = 60.0
"""After a failure that may pass, such as a full device or a hub that does not answer, the aligner is not tried again for so long."""


class ExactTimes:
    """``aligner``: folder or hub id; empty where there is none. ``wake`` is called from another thread when rows that waited are
    ready."""

    def __init__(self, aligner: str, device: Device, wake: Callable[[], None]) -> None:
        self._name = aligner
        self._device = device
        self._wake = wake
        self._lock = threading.Lock()
        self._aligner: ForcedAligner | None = None
        self._languages = LANGUAGES
        self._prepared: set[str] = set()
        self._loading_since = 0.0
        """0 while nothing loads."""
        self._rest_until = 0.0
        self._waiting: list[Qwen3Sequence] = []

    def wanted(self, row: Qwen3Sequence) -> bool:
        """Whether this text asks for them and can have them."""
        if not (self._name and row.request.words and row.language in self._languages and row.text):
            return False
        return time.monotonic() >= self._rest_until

    def decided(self, row: Qwen3Sequence) -> bool:
        """Whether ``of`` may be asked now. If not, the row waits, and is not ready until the aligner is, or has taken too long."""
        with self._lock:
            # Loading may have failed since somebody asked whether they are wanted.
            if self._at_hand(row.language) or not self.wanted(row):
                return True
            if not self._loading_since:
                self._loading_since = time.monotonic()
                threading.Thread(target=self._load, args=(row.language,), name="aligner", daemon=True).start()
            if row.lane is Lane.LIVE or time.monotonic() - self._loading_since >= PATIENCE_S:
                return True
            if not self._waiting:
                timer = threading.Timer(PATIENCE_S, self._release)
                timer.daemon = True
                timer.start()
            row.waits = True
            self._waiting.append(row)
            return False

    def of(self, row: Qwen3Sequence, text: str) -> tuple[Word, ...]:
        """Of the words of ``text`` in the row's sound; none where the aligner is not there or fails: words without exact times are
        worth more than an error."""
        if self._aligner is None or not self._at_hand(row.language):
            return ()
        try:
            return self._aligner.align(row.samples.all(), text, row.language)
        except (NapscribeError, RuntimeError) as error:
            self._failed(error, row.language)
            return ()

    def _at_hand(self, language: str) -> bool:
        return self._aligner is not None and language in self._prepared

    def _load(self, language: str) -> None:
        """In a thread of its own."""
        try:
            prepare(language)
            aligner = self._aligner or ForcedAligner(self._name, self._device, lambda phase, fraction: None)
            with self._lock:
                self._aligner = aligner
                self._prepared.add(language)
        except Exception as error:
            self._failed(error, language)
        finally:
            with self._lock:
                self._loading_since = 0.0
            self._release()

    def _failed(self, error: Exception, language: str) -> None:
        message, hint = getattr(error, "message", str(error))[:300], getattr(error, "hint", "")
        log("alignment_failed", level="warning", error=type(error).__name__, message=message, hint=hint)
        if isinstance(error, ModelLoadFailed) and error.retry_after is None:
            self._name = ""
        elif isinstance(error, Unsupported):
            self._languages -= {language}
        elif self._aligner is None:
            self._rest_until = time.monotonic() + RETRY_S

    def _release(self) -> None:
        with self._lock:
            rows, self._waiting = self._waiting, []
            for row in rows:
                row.waits = False
        if rows:
            self._wake()
