"""``napscribe``: serve, or use a running server from the command line."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from gateway.address import url, usable
from gateway.model import ServedModel, missing_packages
from shared.errors import NapscribeError
from shared.settings import Settings, SettingsError, load
from shared.version import __version__

if TYPE_CHECKING:
    import httpx  # imported when first used: the server does not need it

Files = dict[str, tuple[str, IO[bytes]]]

EXIT_USAGE = 2
EXIT_FAILED = 1

_GIVE_BACK = "dirty_decay_ms:0,muzzy_decay_ms:0"
"""For jemalloc, which is Granian's allocator: pages that are free go back at once. Left alone, it keeps them until some later
request happens to let it look: 25 MiB after 40 uploads at once, for as long as the server sleeps."""


def main() -> int:
    """The command line; returns the exit code."""
    if sys.argv[1:] == ["serve"]:  # argparse and what it brings would stay in the server's memory: half a MiB
        return _serve()
    parser = _parser()
    arguments = parser.parse_args()
    if getattr(arguments, "stream", False) and arguments.format != "text":
        parser.error(f"--stream prints words as they come: --format {arguments.format} cannot be had with it")
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="napscribe", description="A speech-to-text server that sleeps.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server; settings come from NAPSCRIBE_* variables")
    serve.set_defaults(run=_serve)
    transcribe = commands.add_parser("transcribe", help="send a recording to a running server and print its transcript")
    transcribe.add_argument("file", type=Path)
    transcribe.add_argument(
        "--server",
        default=_own_server(),
        help="where it runs; default %(default)s, from NAPSCRIBE_HOST and NAPSCRIBE_PORT",
    )
    transcribe.add_argument("--format", default="text", choices=["text", "json", "verbose_json", "srt", "vtt"])
    transcribe.add_argument("--language", default="", help="such as en; automatic if left out")
    transcribe.add_argument("--stream", action="store_true", help="print the words as they come")
    transcribe.set_defaults(run=_transcribe)
    latency = commands.add_parser(
        "latency", help="sum up a file of NAPSCRIBE_LATENCY_LOG: p50, p90, p99 of every stage"
    )
    latency.add_argument("file", type=Path)
    latency.set_defaults(run=_latency)
    return parser


def _own_server() -> str:
    """The server that these variables would start."""
    host, port = os.environ.get("NAPSCRIBE_HOST") or "127.0.0.1", os.environ.get("NAPSCRIBE_PORT") or "8000"
    return url(_called(host), port)


def _called(host: str) -> str:
    """An address to listen on, as one to call."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _serve(_arguments: argparse.Namespace | None = None) -> int:
    try:
        settings = load(os.environ)
    except SettingsError as error:
        print(f"napscribe: {error}", file=sys.stderr)
        return EXIT_USAGE
    os.environ.setdefault("_RJEM_MALLOC_CONF", _GIVE_BACK)  # read when Granian is loaded
    from gateway.app import ground, serve
    from gateway.loop import EventLoop

    try:
        settings = _with_addresses(settings)
        with ground(settings) as base:
            _greet(settings)
            _warn(base.model)
            with asyncio.Runner(loop_factory=EventLoop) as runner:
                runner.run(serve(base))
    except SettingsError as error:
        print(f"napscribe: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, NapscribeError) as error:
        print(f"napscribe: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _with_addresses(settings: Settings) -> Settings:
    """The same with IP addresses for names. Raises SettingsError for an address that cannot be listened on."""
    host = _usable("NAPSCRIBE_HOST, NAPSCRIBE_PORT", settings.host, settings.port)
    wyoming = settings.wyoming_host
    if settings.wyoming_port:
        if settings.wyoming_port == settings.port:
            raise SettingsError("NAPSCRIBE_WYOMING_PORT and NAPSCRIBE_PORT are the same.")
        wyoming = _usable("NAPSCRIBE_WYOMING_HOST, NAPSCRIBE_WYOMING_PORT", wyoming, settings.wyoming_port)
    return msgspec.structs.replace(settings, host=host, wyoming_host=wyoming)


def _usable(name: str, host: str, port: int) -> str:
    try:
        return usable(host, port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}, port {port} ({name}): {error}") from None


def _greet(settings: Settings) -> None:
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    root = url(_called(settings.host), settings.port)
    print(f"Napscribe {__version__} on {root} — try:", file=sys.stderr)
    print(f"  curl{key} {root}/v1/audio/transcriptions -F file=@recording.wav", file=sys.stderr, flush=True)


def _warn(model: ServedModel) -> None:
    """Of what the first request would run into."""
    if missing := missing_packages(model):
        print(
            f"napscribe: {model.id} needs {', '.join(missing)}, not installed here: pip install 'napscribe[{model.extra}]'. "
            "Until then every request for a transcript fails.",
            file=sys.stderr,
            flush=True,
        )


def _transcribe(arguments: argparse.Namespace) -> int:
    import httpx

    key = os.environ.get("NAPSCRIBE_API_KEYS", "").split(",")[0].strip()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    fields = {"response_format": arguments.format, "language": arguments.language}
    server = arguments.server if "://" in arguments.server else f"http://{arguments.server}"
    door = f"{server.rstrip('/')}/v1/audio/transcriptions"
    try:
        with (
            arguments.file.open("rb") as recording,
            httpx.Client(headers=headers, timeout=httpx.Timeout(30, read=None)) as client,
        ):
            files = {"file": (arguments.file.name, recording)}
            return (
                _print_stream(client, door, fields, files) if arguments.stream else _print(client, door, fields, files)
            )
    except httpx.ConnectError as error:
        print(f"napscribe: no server at {server}: {error}. Start one, or say where it is: --server", file=sys.stderr)
        return EXIT_FAILED
    except (httpx.HTTPError, OSError) as error:
        print(f"napscribe: {error or type(error).__name__}", file=sys.stderr)
        return EXIT_FAILED


def _print(client: httpx.Client, url: str, fields: dict[str, str], files: Files) -> int:
    response = client.post(url, data=fields, files=files)
    if response.is_error:
        return _complain(response)
    sys.stdout.write(response.text if response.text.endswith("\n") else response.text + "\n")
    return 0


def _print_stream(client: httpx.Client, url: str, fields: dict[str, str], files: Files) -> int:
    with client.stream("POST", url, data={**fields, "stream": "true"}, files=files) as response:
        if response.is_error:
            response.read()
            return _complain(response)
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                print(f"\nnapscribe: {event['error']['message']}", file=sys.stderr)
                return EXIT_FAILED
            sys.stdout.write(event.get("delta", ""))
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    from gateway.latency import PERCENTILES, summary

    try:
        with arguments.file.open("rb") as lines:
            rows, foreign = summary(lines)
    except OSError as error:
        print(f"napscribe: {error}", file=sys.stderr)
        return EXIT_FAILED
    if foreign:
        print(f"napscribe: {foreign} lines are not of a latency log and were left out.", file=sys.stderr)
    if not rows:
        print("napscribe: no utterance in this file.", file=sys.stderr)
        return EXIT_FAILED
    print(f"{'stage, ms':<20}{'count':>8}" + "".join(f"{f'p{share}':>10}" for share in PERCENTILES))
    for row in rows:
        print(f"{row.stage:<20}{row.count:>8}" + "".join(f"{ms:>10.1f}" for ms in row.ms))
    return 0


def _complain(response: httpx.Response) -> int:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    print(f"napscribe: {response.status_code}: {message}", file=sys.stderr)
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
