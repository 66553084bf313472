"""Uploads: through a real server and real sockets where those matter, through the parser alone elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.answers.errors_http import HANDLERS, ErrorBoundary
from gateway.files.spool import Spool, SpoolFile
from gateway.files.upload import MAX_FIELDS, MAX_FIELDS_BYTES, Form, receive_body, receive_form
from shared import errors
from tests.serving import serving

MEBIBYTE = 1024 * 1024
MAX_FILE = 4 * MEBIBYTE
BOUNDARY = b"----boundary-7MA4YWxk"


class WatchedSpool(Spool):
    """A spool that says when an upload begins."""

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        super().__init__(directory, quota_bytes)
        self.begun = asyncio.Event()

    def create(self) -> SpoolFile:
        self.begun.set()
        return super().create()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[WatchedSpool]:
    made = WatchedSpool(tmp_path / "spool", 16 * MEBIBYTE)
    yield made
    made.close()


async def nothing_is_left(spool: Spool) -> bool:
    await spool.settle()
    return spool.used_bytes == 0 and [path.name for path in spool.folder.iterdir()] == ["lock"]


# ---------------------------------------------------------------- a real server


@dataclass
class Door:
    """A server with an upload door at ``/form`` and one at ``/raw``; both answer with what they received."""

    spool: WatchedSpool
    url: str = ""
    failures: list[BaseException] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def app(self) -> Starlette:
        async def form(request: Request) -> JSONResponse:
            return await self._answer(receive_form(request, self.spool, max_file_bytes=MAX_FILE))

        async def raw(request: Request) -> JSONResponse:
            return await self._answer(receive_body(request, self.spool, max_file_bytes=MAX_FILE))

        routes = [Route(path, form, methods=["POST"]) for path in ("/form", "/v1/audio/transcriptions")]
        routes.append(Route("/raw", raw, methods=["POST"]))
        return Starlette(routes=routes, middleware=[Middleware(ErrorBoundary)], exception_handlers=HANDLERS)

    async def _answer(self, receiving: Awaitable[Form]) -> JSONResponse:
        try:
            form = await receiving
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            self.ended.set()
        stored = await asyncio.to_thread(form.file.path.read_bytes)
        form.file.discard()
        digest = hashlib.sha256(stored).hexdigest()
        return JSONResponse(
            {"text": digest, "fields": form.fields, "filename": form.filename, "type": form.content_type}
        )


@asynccontextmanager
async def opened(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    """The door being served, and a client of it."""
    async with serving(door.app()) as door.url, httpx.AsyncClient(base_url=door.url, timeout=30) as client:
        yield client


@pytest.fixture
def door(spool: WatchedSpool) -> Door:
    return Door(spool)


async def test_a_form_with_a_large_file(door: Door) -> None:
    audio = random.Random(2).randbytes(3 * MEBIBYTE) + b"\r\n--" + b"\r\n" * 1000
    async with opened(door) as client:
        reply = await client.post(
            "/form",
            files={"file": ("Gespräch.wav", audio, "audio/wav")},
            data={"model": "whisper-1", "prompt": "Zoë, naïve", "timestamp_granularities[]": ["word", "segment"]},
        )
    assert reply.status_code == 200
    assert reply.json() == {
        "text": hashlib.sha256(audio).hexdigest(),
        "fields": {
            "model": ["whisper-1"],
            "prompt": ["Zoë, naïve"],
            "timestamp_granularities[]": ["word", "segment"],
        },
        "filename": "Gespräch.wav",
        "type": "audio/wav",
    }
    assert await nothing_is_left(door.spool)


async def test_the_openai_sdk_uploads(door: Door) -> None:
    audio = bytes(range(256)) * 64
    async with opened(door), openai.AsyncOpenAI(api_key="k", base_url=f"{door.url}/v1", max_retries=0) as client:
        reply = await client.audio.transcriptions.create(
            model="whisper-1",
            file=("a.wav", audio),
            timestamp_granularities=["word"],
            chunking_strategy={"type": "server_vad", "threshold": 0.5},
            keywords=["Napscribe", "Moonshine"],
        )
    assert reply.text == hashlib.sha256(audio).hexdigest()
    fields = reply.model_extra["fields"] if reply.model_extra else {}
    assert fields["timestamp_granularities[]"] == ["word"]
    assert fields["keywords[]"] == ["Napscribe", "Moonshine"]
    assert fields["chunking_strategy[type]"] == ["server_vad"]


async def test_a_chunked_body_without_a_length(door: Door) -> None:
    body = form_body(file(b"a" * 500_000), text("model", b"m"))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7919):
            yield body[start : start + 7919]

    async with opened(door) as client:
        reply = await client.post("/form", content=pieces(), headers=FORM)
    assert reply.json()["text"] == hashlib.sha256(b"a" * 500_000).hexdigest()


async def test_a_raw_body(door: Door) -> None:
    async with opened(door) as client:
        reply = await client.post("/raw", content=b"RIFF" * 200_000, headers={"content-type": "Audio/WAV; x=1"})
        empty = await client.post("/raw", content=b"")
        large = await client.post("/raw", content=bytes(MAX_FILE + 1))
    assert reply.json()["text"] == hashlib.sha256(b"RIFF" * 200_000).hexdigest()
    assert reply.json()["type"] == "audio/wav"
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "empty_audio")
    assert (large.status_code, large.json()["error"]["code"]) == (413, "upload_too_large")
    assert await nothing_is_left(door.spool)


@pytest.mark.parametrize("announced", [True, False])
async def test_too_large_is_answered_and_not_reset(door: Door, announced: bool) -> None:
    """The client sends its whole body before it reads; it must still find the answer there."""
    body = form_body(file(bytes(16 * MEBIBYTE)))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with opened(door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        length = b"content-length: %d" % len(body) if announced else b"transfer-encoding: chunked"
        writer.write(b"POST /form HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n" + CONTENT_TYPE + b"\r\n\r\n")
        async for piece in pieces():
            writer.write(piece if announced else b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if not announced:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 413")
    assert await nothing_is_left(door.spool)


async def test_who_asks_first_is_refused_before_sending(door: Door) -> None:
    """``Expect: 100-continue``, as curl does: the answer comes without an invitation to send."""
    async with opened(door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(
            b"POST /form HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\nexpect: 100-continue\r\n"
            + CONTENT_TYPE
            + b"\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(door: Door) -> None:
    body = form_body(file(bytes(3 * MEBIBYTE)))
    async with opened(door):
        _, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(b"POST /form HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body))
        writer.write(CONTENT_TYPE + b"\r\n\r\n" + body[: MEBIBYTE + 7])
        await writer.drain()
        await door.spool.begun.wait()
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(door.ended.wait(), 10)
    assert isinstance(door.failures[0], errors.Cancelled)
    assert await nothing_is_left(door.spool)


async def test_a_full_spool_asks_to_come_back(door: Door) -> None:
    """More at once than there is room for: each one is answered, and the room is back afterwards."""
    spool = door.spool
    spool.quota_bytes = 2 * MEBIBYTE
    audio = random.Random(3).randbytes(300_000)
    held = spool.create()
    await held.write(bytes(MEBIBYTE))  # a job in the queue

    async def pieces() -> AsyncIterator[bytes]:
        body = form_body(file(audio))
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with opened(door) as client:
        replies = await asyncio.gather(*(client.post("/form", content=pieces(), headers=FORM) for _ in range(40)))
        large = await client.post("/form", files={"file": ("a.wav", bytes(MEBIBYTE + 1))})
    statuses = {reply.status_code for reply in [*replies, large]}
    assert statuses <= {200, 503} and large.status_code == 503
    for reply in [*replies, large]:
        if reply.status_code == 503:
            assert reply.json()["error"]["code"] == "spool_full"
            assert int(reply.headers["retry-after"]) >= 1
        else:
            assert reply.json()["text"] == hashlib.sha256(audio).hexdigest()
    held.discard()
    assert await nothing_is_left(spool)


# ---------------------------------------------------------------- the parser alone


FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
CONTENT_TYPE = b"content-type: " + FORM["content-type"].encode()


def part(disposition: bytes, data: bytes, *headers: bytes) -> bytes:
    lines = [b"--" + BOUNDARY, b"Content-Disposition: form-data; " + disposition, *headers, b"", data]
    return b"\r\n".join(lines) + b"\r\n"


def file(data: bytes, name: bytes = b"file", filename: bytes = b"a.wav") -> bytes:
    return part(b'name="%b"; filename="%b"' % (name, filename), data, b"Content-Type: application/octet-stream")


def text(name: str, data: bytes) -> bytes:
    return part(b'name="%b"' % name.encode(), data)


def form_body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def request_of(pieces: list[bytes], headers: dict[str, str] | None = None) -> Request:
    """A request whose body arrives in these pieces."""
    messages = iter(
        [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        + [{"type": "http.request", "body": b"", "more_body": False}]
    )

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        assert message is not None, "read past the end of the body: a server would wait there for ever"
        return message

    given = FORM | {"transfer-encoding": "chunked"} | (headers or {})
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw}, receive)


async def parse(spool: Spool, *parts: bytes, headers: dict[str, str] | None = None, **options: Any) -> Form:
    return await receive_form(
        request_of([form_body(*parts)], headers), spool, **{"max_file_bytes": MAX_FILE, **options}
    )


async def refusal(spool: Spool, *parts: bytes, body: bytes | None = None, **options: Any) -> errors.NapscribeError:
    """The error of a form; proves on the way that nothing of it is left."""
    request = request_of([form_body(*parts) if body is None else body], options.pop("headers", None))
    with pytest.raises(errors.NapscribeError) as caught:
        await receive_form(request, spool, **{"max_file_bytes": MAX_FILE, **options})
    assert await nothing_is_left(spool)
    return caught.value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_form_does_not_depend_on_how_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any split of any body, boundaries included, gives the same file and the same fields."""
    alphabet = st.sampled_from([b"\r", b"\n", b"-", b"\r\n--", b"\r\n--" + BOUNDARY[:9], b"x", bytes(50)])
    audio = b"".join(data.draw(st.lists(alphabet, min_size=1, max_size=30)))
    prompt = data.draw(st.text(max_size=40))
    body = form_body(text("prompt", prompt.encode()), file(audio), text("model", b"m"))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    spool = Spool(tmp_path_factory.getbasetemp() / "cuts", MEBIBYTE)

    async def receive() -> None:
        form = await receive_form(request_of(pieces), spool, max_file_bytes=MAX_FILE)
        assert form.file.path.read_bytes() == audio
        assert form.fields == {"prompt": [prompt], "model": ["m"]}

    try:
        asyncio.run(receive())
    finally:
        spool.close()


async def test_a_long_prompt_is_taken(spool: Spool) -> None:
    prompt = "Wörter " * 100_000
    form = await parse(spool, text("prompt", prompt.encode()), file(b"x"))
    assert form.fields["prompt"] == [prompt]
    form.file.discard()


async def test_old_clients_send_latin_1(spool: Spool) -> None:
    form = await parse(spool, text("prompt", "Zoë".encode("latin-1")), file(b"x"))
    assert form.fields["prompt"] == ["Zoë"]
    form.file.discard()


@pytest.mark.parametrize(
    ("sent", "kept"),
    [(b"C:\\Users\\me\\a.wav", "a.wav"), (b"../../etc/passwd", "passwd"), (b"a\x00\x1bb.wav", "ab.wav"), (b"", "")],
)
async def test_a_filename_is_a_name_and_nothing_else(spool: Spool, sent: bytes, kept: str) -> None:
    form = await parse(spool, file(b"x", filename=sent))
    assert form.filename == kept
    assert form.file.path.parent == spool.folder
    form.file.discard()


async def test_other_names_for_the_file(spool: Spool) -> None:
    form = await parse(spool, file(b"x", name=b"audio_file"), file_fields=("audio_file", "file"))
    assert form.file.path.read_bytes() == b"x"
    form.file.discard()


async def test_a_file_without_a_name_is_a_file_if_it_says_so(spool: Spool) -> None:
    form = await parse(spool, part(b'name="file"', b"RIFF", b"Content-Type: audio/wav"))
    assert (form.file.path.read_bytes(), form.content_type) == (b"RIFF", "audio/wav")
    form.file.discard()


async def test_no_file(spool: Spool) -> None:
    error = await refusal(spool, text("model", b"m"))
    assert isinstance(error, errors.MissingField) and error.param == "file" and "curl -F" in error.hint


async def test_the_file_in_another_field_is_named(spool: Spool) -> None:
    error = await refusal(spool, file(b"x", name=b"audio"))
    assert isinstance(error, errors.MissingField) and "'audio'" in error.hint


async def test_a_path_instead_of_a_file(spool: Spool) -> None:
    error = await refusal(spool, text("file", b"audio.wav"))
    assert isinstance(error, errors.MissingField) and "@" in error.hint


async def test_an_empty_file(spool: Spool) -> None:
    error = await refusal(spool, file(b""))
    assert isinstance(error, errors.EmptyAudio) and error.param == "file"


async def test_two_files(spool: Spool) -> None:
    error = await refusal(spool, file(b"x"), file(b"y"))
    assert error.code == "invalid_value" and "more than one" in error.message


async def test_a_file_of_exactly_the_bound_and_one_byte_more(spool: Spool) -> None:
    form = await parse(spool, file(bytes(1000)), max_file_bytes=1000)
    form.file.discard()
    error = await refusal(spool, file(bytes(1001)), max_file_bytes=1000)
    assert isinstance(error, errors.UploadTooLarge) and "1000 bytes" in error.message


async def test_a_body_that_is_all_envelope(spool: Spool) -> None:
    error = await refusal(spool, file(bytes(3 * MEBIBYTE), name=b"other"), max_file_bytes=1000)
    assert isinstance(error, errors.UploadTooLarge)


async def test_too_many_fields(spool: Spool) -> None:
    form = await parse(spool, *[text("a", b"1")] * (MAX_FIELDS - 1), file(b"x"))
    form.file.discard()
    error = await refusal(spool, *[text("a", b"1")] * MAX_FIELDS, file(b"x"))
    assert error.http_status == 400 and str(MAX_FIELDS) in error.message


async def test_fields_that_are_too_long_together(spool: Spool) -> None:
    half = bytes(MAX_FIELDS_BYTES // 2)
    error = await refusal(spool, text("prompt", half), text("extra", half), text("last", b"x"), file(b"x"))
    assert error.http_status == 400 and error.param == "last"


@pytest.mark.parametrize(
    "body",
    [
        b"not a form at all",
        b"--" + BOUNDARY + b"\r\nno colon\r\n\r\nx",
        form_body(file(b"x"))[:-10],
        b"",
        form_body(part(b'filename="a.wav"', b"x")),
        form_body(part(b'name="file"; filename="a"', b"eHh4", b"Content-Transfer-Encoding: base64")),
        form_body(part(b'name="' + b"n" * 9000 + b'"', b"x")),
        form_body(part(b'name="file"', b"x", *[b"X-Header: 1"] * 40)),
    ],
    ids=["text", "header", "cut", "empty", "nameless", "base64", "long-header", "many-headers"],
)
async def test_a_malformed_form_is_the_callers_fault(spool: Spool, body: bytes) -> None:
    error = await refusal(spool, body=body)
    assert (error.http_status, error.code) == (400, "invalid_value")


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/x-www-form-urlencoded",
        "audio/wav",
        "",
        "multipart/form-data",
        "multipart/form-data; boundary=" + "b" * 300,
        "multipart/mixed; boundary=x",
    ],
)
async def test_another_content_type_is_told_how(spool: Spool, content_type: str) -> None:
    error = await refusal(spool, file(b"x"), headers={"content-type": content_type})
    assert error.http_status == 400 and "curl -F" in error.hint


async def test_what_cannot_fit_is_refused_before_its_first_byte(spool: Spool) -> None:
    def unread(length: int) -> Request:
        async def receive() -> dict[str, Any]:
            raise AssertionError("the body was read")

        headers = FORM | {"content-length": str(length), "expect": "100-continue"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)

    with pytest.raises(errors.UploadTooLarge):
        await receive_form(unread(MAX_FILE + 3 * MEBIBYTE), spool, max_file_bytes=MAX_FILE)
    with pytest.raises(errors.UploadTooLarge):  # never fits, however empty the spool
        await receive_form(unread(20 * MEBIBYTE), spool, max_file_bytes=1 << 40)
    held = spool.create()
    held.reserve(15 * MEBIBYTE)
    with pytest.raises(errors.SpoolFull):
        await receive_form(unread(4 * MEBIBYTE), spool, max_file_bytes=MAX_FILE)
    held.discard()


async def test_a_cancelled_upload_leaves_nothing(spool: WatchedSpool) -> None:
    waiting = asyncio.Event()
    pieces = iter([form_body(file(bytes(MEBIBYTE)))[: MEBIBYTE // 2]])

    async def receive() -> dict[str, Any]:
        for piece in pieces:
            return {"type": "http.request", "body": piece, "more_body": True}
        waiting.set()
        return await asyncio.Future[dict[str, Any]]()

    request = Request({**request_of([]).scope}, receive)
    receiving = asyncio.ensure_future(receive_form(request, spool, max_file_bytes=MAX_FILE))
    await waiting.wait()
    assert spool.used_bytes > 0
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert await nothing_is_left(spool)
