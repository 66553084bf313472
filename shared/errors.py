"""Everything that can go wrong, as one tree. A code crosses the wire; a sentence is for people.

NapscribeError
├── BadRequest            400  invalid_value            the caller can mend the request
│   ├── MissingField      400  missing_field
│   ├── EmptyAudio        400  empty_audio
│   ├── UnsupportedAudio  415  unsupported_audio        not audio, or a codec nobody here knows
│   ├── AudioOverrun      413  audio_overrun            live audio faster than it can be taken, for too long
│   ├── SlowReader        400  slow_reader              a live client that does not read its transcript
│   ├── AudioTooLong      413  audio_too_long           decoded seconds or bytes over the bound
│   ├── UploadTooLarge    413  upload_too_large
│   └── Unsupported       501  unsupported              a feature this engine does not have
├── Unauthorized          401  invalid_api_key
├── ModelNotFound         404  model_not_found
├── NotFound              404  not_found
├── MethodNotAllowed      405  method_not_allowed
├── UpgradeRequired       426  upgrade_required         a live door, asked without a WebSocket
├── Conflict              409  unload_aborted
├── Busy                  retry later, nothing of the request was done
│   ├── QueueFull         429  queue_full
│   ├── QueueTimeout      503  queue_timeout
│   ├── TooManyStreams    429  too_many_streams         live streams over what the engine can keep up with
│   ├── SpoolFull         503  spool_full
│   ├── ShuttingDown      503  shutting_down
│   ├── WorkerUnavailable 503  worker_unavailable       it does not start, or is in cooldown
│   ├── WorkerGone        503  worker_gone              it left between two messages
│   └── ChannelFull       503  channel_full             it does not read its messages
├── WorkFailed            the request was taken and could not be finished
│   ├── WorkerCrashed     500  worker_crashed           this input ended the worker twice
│   ├── ModelLoadFailed   503  model_load_failed
│   ├── OutOfMemory       503  out_of_memory
│   ├── EngineFailed      500  engine_failed
│   └── Cancelled         499  cancelled                the caller left
└── ProtocolError         500  protocol_error           a message that is not one of ours
"""

from __future__ import annotations

from typing import ClassVar


class NapscribeError(Exception):
    """Root of the tree. ``message`` says what happened, ``hint`` what to do, ``param`` which field is meant."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    usual_hint: ClassVar[str] = ""
    """Where the raiser has no better one."""

    def __init__(
        self, message: str, *, hint: str = "", param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint
        self.param = param
        self.retry_after = retry_after
        """Seconds after which a retry makes sense; None where it makes none, or nobody knows."""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class BadRequest(NapscribeError):
    code = "invalid_value"
    http_status = 400


class MissingField(BadRequest):
    code = "missing_field"


class EmptyAudio(BadRequest):
    code = "empty_audio"


class UnsupportedAudio(BadRequest):
    code = "unsupported_audio"
    http_status = 415


class AudioOverrun(BadRequest):
    code = "audio_overrun"
    http_status = 413


class SlowReader(BadRequest):
    code = "slow_reader"


class AudioTooLong(BadRequest):
    code = "audio_too_long"
    http_status = 413


class UploadTooLarge(BadRequest):
    code = "upload_too_large"
    http_status = 413


class Unsupported(BadRequest):
    code = "unsupported"
    http_status = 501


class Unauthorized(NapscribeError):
    code = "invalid_api_key"
    http_status = 401


class NotFound(NapscribeError):
    code = "not_found"
    http_status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(NapscribeError):
    code = "method_not_allowed"
    http_status = 405


class UpgradeRequired(NapscribeError):
    code = "upgrade_required"
    http_status = 426


class Conflict(NapscribeError):
    code = "unload_aborted"
    http_status = 409


class Busy(NapscribeError):
    code = "busy"
    http_status = 503
    retryable = True


class QueueFull(Busy):
    code = "queue_full"
    http_status = 429


class TooManyStreams(Busy):
    code = "too_many_streams"
    http_status = 429


class QueueTimeout(Busy):
    code = "queue_timeout"


class SpoolFull(Busy):
    code = "spool_full"


class ShuttingDown(Busy):
    code = "shutting_down"


class WorkerUnavailable(Busy):
    code = "worker_unavailable"


class WorkerGone(Busy):
    code = "worker_gone"


class ChannelFull(Busy):
    code = "channel_full"


class WorkFailed(NapscribeError):
    code = "work_failed"
    http_status = 500


class WorkerCrashed(WorkFailed):
    code = "worker_crashed"


class ModelLoadFailed(WorkFailed):
    code = "model_load_failed"
    http_status = 503


class OutOfMemory(WorkFailed):
    code = "out_of_memory"
    http_status = 503
    retryable = True


class EngineFailed(WorkFailed):
    code = "engine_failed"
    usual_hint = "Other requests are not affected. The server's log says more; please report it, with the recording if you can share it."


class Cancelled(WorkFailed):
    code = "cancelled"
    http_status = 499


class ProtocolError(NapscribeError):
    code = "protocol_error"


def _tree(root: type[NapscribeError]) -> dict[str, type[NapscribeError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[NapscribeError]] = _tree(NapscribeError)
"""Code to class, for errors that arrive over the wire."""


def from_code(
    code: str, message: str, *, hint: str = "", param: str | None = None, retry_after: float | None = None
) -> NapscribeError:
    """The typed error of a code that crossed the wire; an unknown code becomes the root."""
    return BY_CODE.get(code, NapscribeError)(message, hint=hint, param=param, retry_after=retry_after)
