"""From the body of a request to a file in the spool, as it arrives: nothing of it is ever whole in memory.

The parser is python-multipart's, driven by callbacks; it is imported with the first upload. After a refusal (too large,
no room, malformed) nothing is left in the spool; what the client still sends is ``ErrorBoundary``'s to drop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.files.spool import Spool, SpoolFile, spool_full
from gateway.request_body import Body
from shared import errors

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks
    from starlette.requests import Request

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of every malformed byte a client sends

MAX_FIELDS = 256
"""Parts of one form, files included."""

MAX_FIELDS_BYTES = 1024 * 1024
"""Bytes of all text fields of one form together; the longest of them is a prompt."""

MAX_ENVELOPE_BYTES = 1024 * 1024
"""Bytes of a form that are neither its file nor its text: boundaries, part headers, other files, preamble."""

MAX_PART_HEADERS = 16
MAX_PART_HEADER_BYTES = 8 * 1024
"""Bytes of one header line of a part."""

_BARE_VALUE_BYTES = 1024
"""A file field without name and type, and no longer than this, is a path that a shell user forgot the @ of."""

CURL_EXAMPLE = "curl -F model=whisper-1 -F file=@audio.wav …"


@dataclass(slots=True)
class Form:
    """What a request brought. Whoever has it discards ``file`` in the end."""

    file: SpoolFile
    """Closed, whole, not empty."""
    fields: dict[str, list[str]] = field(default_factory=dict)
    """Text fields by name, in the order they came."""
    filename: str = ""
    """Last component of what the client called it, printable; for messages only, never a path."""
    content_type: str = ""
    """As the client declared it, lower case, without parameters."""


async def receive_form(
    request: Request, spool: Spool, *, max_file_bytes: int, file_fields: Sequence[str] = ("file",)
) -> Form:
    """Parse ``multipart/form-data``; the first part named in ``file_fields`` goes to the spool.

    Raises BadRequest (wrong content type, malformed or cut off, too many fields, two files), MissingField, EmptyAudio,
    UploadTooLarge, SpoolFull, Cancelled. Nothing stays in the spool after any of them, nor after a cancellation.
    """
    bounds = _Bounds(min(max_file_bytes, spool.quota_bytes), MAX_FIELDS_BYTES + MAX_ENVELOPE_BYTES)
    async with _receiving(request, spool, bounds) as (body, file):
        parts = _Parts(file_fields)
        await _parse(body, _boundary(request.headers.get("content-type", "")), parts, file, bounds)
        parts.check_file(file.size)
        await file.close()
    return Form(file, parts.fields, parts.filename, parts.content_type)


async def receive_body(request: Request, spool: Spool, *, max_file_bytes: int) -> Form:
    """The raw body as the file, for doors that take no form. Raises as ``receive_form`` does."""
    bounds = _Bounds(min(max_file_bytes, spool.quota_bytes), 0)
    async with _receiving(request, spool, bounds) as (body, file):
        while (chunk := await body.read()) is not None:
            bounds.check_file(file.size + len(chunk))
            await file.write(chunk)
        if file.size == 0:
            raise errors.EmptyAudio("The body is empty.", hint="Send the audio as the body of the request.")
        await file.close()
    return Form(file, content_type=_bare_type(request.headers.get("content-type", "")))


@dataclass(frozen=True, slots=True)
class _Bounds:
    file_bytes: int
    envelope_bytes: int
    """What a body may have beside its file."""

    def check_announced(self, headers: Mapping[str, str], spool: Spool) -> None:
        """Refuse by Content-Length, before the first byte, what cannot fit. Raises UploadTooLarge, SpoolFull."""
        announced = headers.get("content-length", "")
        if announced.isdecimal():
            self.check_body(int(announced))
            if int(announced) - self.envelope_bytes > spool.free_bytes:
                raise spool_full()

    def check_body(self, size: int) -> None:
        self.check_file(size - self.envelope_bytes)

    def check_file(self, size: int) -> None:
        if size > self.file_bytes:
            raise errors.UploadTooLarge(
                f"The upload is larger than {_amount(self.file_bytes)}.",
                hint="Send it compressed (Opus, MP3) or in parts, or ask the operator to raise the bound.",
                param="file",
            )


@contextlib.asynccontextmanager
async def _receiving(request: Request, spool: Spool, bounds: _Bounds) -> AsyncIterator[tuple[Body, SpoolFile]]:
    """A body and a new file; whatever goes wrong, the file is gone."""
    body = Body(request.receive, request.headers)
    file = spool.create()
    try:
        bounds.check_announced(request.headers, spool)
        yield body, file
    except BaseException:
        file.discard()
        raise


async def _parse(body: Body, boundary: bytes, parts: _Parts, file: SpoolFile, bounds: _Bounds) -> None:
    """Drive the parser over the whole body. Raises BadRequest, UploadTooLarge and what ``SpoolFile.write`` raises."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    received = 0
    try:
        parser = MultipartParser(
            boundary, parts.callbacks(), max_header_count=MAX_PART_HEADERS, max_header_size=MAX_PART_HEADER_BYTES
        )
        while (chunk := await body.read()) is not None:
            received += len(chunk)
            bounds.check_body(received)
            parser.write(chunk)
            for piece in parts.take():
                bounds.check_file(file.size + len(piece))
                await file.write(piece)
    except FormParserError as error:
        raise errors.BadRequest("The form is malformed.", hint=f"For example: {CURL_EXAMPLE}") from error
    if not parts.ended:
        raise errors.BadRequest(
            "The form ends before its closing boundary.", hint="The upload was cut off; send it again."
        )


class _Parts:
    """Callbacks of the parser. They cannot wait, so bytes of the file are left in ``take`` for who can."""

    def __init__(self, file_fields: Sequence[str]) -> None:
        self.fields: dict[str, list[str]] = {}
        self.filename = ""
        self.content_type = ""
        self.ended = False
        self._file_fields = file_fields
        self._file_field = ""
        self._other_file = ""
        self._named = False
        self._count = 0
        self._fields_bytes = 0
        self._pieces: list[memoryview] = []
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[str, bytes] = {}
        self._name = ""
        self._text = bytearray()
        self._target = ""  # of the part's data: "file", "text", "" for nowhere

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self.on_part_begin,
            "on_part_data": self.on_part_data,
            "on_part_end": self.on_part_end,
            "on_header_field": self.on_header_field,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_headers_finished": self.on_headers_finished,
            "on_end": self.on_end,
        }

    def take(self) -> list[memoryview]:
        """Bytes of the file that the last write brought."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def check_file(self, size: int) -> None:
        """Raises MissingField or EmptyAudio unless the form brought a file of ``size`` bytes."""
        param = self._file_field or self._file_fields[0]
        if not self._file_field:
            hint = f"It has one in {self._other_file!r}." if self._other_file else f"For example: {CURL_EXAMPLE}"
            raise errors.MissingField(f"The form has no file in {param!r}.", hint=hint, param=param)
        if not self._named and not self.content_type and size <= _BARE_VALUE_BYTES:
            raise errors.MissingField(
                f"{param!r} holds a short text instead of a file.",
                hint=f"curl sends a file when its path has an @ in front: {CURL_EXAMPLE}",
                param=param,
            )
        if size == 0:
            raise errors.EmptyAudio("The file is empty.", param=param)

    def on_part_begin(self) -> None:
        self._count += 1
        if self._count > MAX_FIELDS:
            raise errors.BadRequest(f"The form has more than {MAX_FIELDS} fields.")
        self._headers = {}
        self._text = bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get("content-disposition"))
        if b"name" not in options:
            raise errors.BadRequest("A part of the form has no name in its Content-Disposition.")
        if self._headers.get("content-transfer-encoding", b"binary").strip().lower() not in (
            b"binary",
            b"8bit",
            b"7bit",
        ):
            raise errors.BadRequest(
                "A part of the form has a transfer encoding.", hint="Send the bytes of the file as they are."
            )
        self._name = _decode(options[b"name"])
        if self._name in self._file_fields:
            self._begin_file(options)
        elif b"filename" in options:
            self._target = ""
            self._other_file = _printable_name(self._name)
        else:
            self._target = "text"

    def _begin_file(self, options: dict[bytes, bytes]) -> None:
        if self._file_field:
            raise errors.BadRequest("The form has more than one file.", param=self._name)
        self._target = "file"
        self._file_field = self._name
        self._named = b"filename" in options
        self.filename = _printable_name(_decode(options.get(b"filename", b"")))
        self.content_type = _bare_type(_decode(self._headers.get("content-type", b"")))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._target == "file":
            self._pieces.append(memoryview(data)[start:end])
        elif self._target == "text":
            self._fields_bytes += end - start
            if self._fields_bytes > MAX_FIELDS_BYTES:
                raise errors.BadRequest(
                    f"The text fields of the form have more than {MAX_FIELDS_BYTES} bytes.", param=self._name
                )
            self._text += data[start:end]

    def on_part_end(self) -> None:
        if self._target == "text":
            self.fields.setdefault(self._name, []).append(_decode(bytes(self._text)))

    def on_end(self) -> None:
        self.ended = True


def _boundary(content_type: str) -> bytes:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    hint = f"Send multipart/form-data, for example: {CURL_EXAMPLE}"
    if kind != b"multipart/form-data":
        got = kind.decode("latin-1") or "none"
        raise errors.BadRequest(f"The body must be a form with a file; its content type is {got}.", hint=hint)
    if not options.get(b"boundary"):
        raise errors.BadRequest("The content type names no boundary.", hint=hint)
    return options[b"boundary"]


def _amount(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10_000_000 else f"{size} bytes"


def _bare_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _decode(raw: bytes) -> str:
    """Text of a form: UTF-8 as browsers and SDKs send it, else latin-1 as old clients do."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _printable_name(filename: str) -> str:
    last = filename.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(char for char in last if char.isprintable())[:255]
