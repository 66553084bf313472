"""Exact word times of complete texts: the forced aligner, loaded when the first text asks for it."""

from __future__ import annotations

from shared.errors import ModelLoadFailed, NapscribeError, Unsupported
from shared.journal import log
from worker.engines.base import WordTime
from worker.engines.qwen3.aligner import LANGUAGES, ForcedAligner
from worker.engines.qwen3.device import Device
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.words import prepare


class ExactTimes:
    """``aligner``: folder or hub id; empty where there is none."""

    def __init__(self, aligner: str, device: Device) -> None:
        self._name = aligner
        self._device = device
        self._aligner: ForcedAligner | None = None
        self._languages = LANGUAGES

    def wanted(self, row: Qwen3Sequence) -> bool:
        """Whether this text asks for them and can have them."""
        return bool(self._name and row.request.words and row.language in self._languages and row.text)

    def of(self, row: Qwen3Sequence, text: str) -> tuple[WordTime, ...]:
        """Of the words of ``text`` in the row's sound; none where the aligner fails: words without exact times are worth more
        than an error."""
        try:
            prepare(row.language)
            if self._aligner is None:
                self._aligner = ForcedAligner(self._name, self._device, lambda phase, fraction: None)
            return self._aligner.align(row.samples.all(), text, row.language)
        except (NapscribeError, RuntimeError) as error:
            log("alignment_failed", level="warning", error=type(error).__name__, message=str(error)[:300])
            if isinstance(error, ModelLoadFailed):
                self._name = ""
            elif isinstance(error, Unsupported):
                self._languages -= {row.language}
            return ()
