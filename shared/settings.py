"""The environment, read once at start into one frozen struct; every value checked, every unknown name refused."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.cores import NEAR_GPU, format_cores, parse_cores

PREFIX = "NAPSCRIBE_"


class SettingsError(ValueError):
    """The environment says something that cannot be meant. The message names the variable and what it takes."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Units stand in the names: ``_seconds``, ``_mb`` (MiB)."""

    host: str
    port: int
    api_keys: tuple[str, ...]
    model: str
    live_model: str
    idle_seconds: float
    spool_dir: Path
    spool_mb: int
    max_upload_mb: int
    max_audio_seconds: float
    max_queue: int
    queue_seconds: float
    start_stall_seconds: float
    threads: int
    cpus: str
    gpu_memory_mb: int
    aligner: str
    latency_log: Path | None
    debug_timing: int
    wyoming_port: int
    wyoming_host: str
    runtime_dir: Path
    worker: str
    twilio_auth_token: str
    call_webhook: str
    call_webhook_secret: str


@dataclass(frozen=True)
class Setting:
    """One row of the table in the README."""

    field: str
    default: str
    help: str
    parse: Callable[[str], Any]
    takes: str

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _text(text: str) -> str:
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError
    return text


def _any_text(text: str) -> str:
    return text


def _url(text: str) -> str:
    if text and not (text.startswith(("http://", "https://")) and text.isprintable() and " " not in text):
        raise ValueError
    return text


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(",") if key.strip())


def _cores(text: str) -> str:
    """As Linux would write them. Raises ValueError for cores that this process may not use: the worker may not, either."""
    if not text or text.lower() == NEAR_GPU:
        return text.lower()
    cores = parse_cores(text)
    if not cores <= os.sched_getaffinity(0):
        raise ValueError
    return format_cores(cores)


def _folder(default: str) -> Callable[[str], Path]:
    def parse(text: str) -> Path:
        return _absolute(text or default)

    return parse


def _absolute(text: str) -> Path:
    """Raises ValueError for the home of somebody who is not there."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _file(text: str) -> Path | None:
    path = _absolute(text) if text else None
    if path is not None and not path.parent.is_dir():
        raise ValueError
    return path


def _row(field: str, default: str, help: str, parse: Callable[[str], Any], takes: str) -> Setting:  # noqa: A002
    return Setting(field, default, help, parse, takes)


TABLE: tuple[Setting, ...] = (
    _row("host", "127.0.0.1", "Address to listen on.", _text, "an address"),
    _row("port", "8000", "Port to listen on.", _number(int, 1, 65535), "1 to 65535"),
    _row("api_keys", "", "Comma list of keys; empty leaves every door open.", _keys, "keys separated by commas"),
    _row(
        "model",
        "auto",
        "`auto`, `embedded`, a hub id or a folder. `auto` is Qwen3-ASR-1.7B where CUDA is, else `embedded`.",
        _text,
        "a model",
    ),
    _row(
        "live_model",
        "",
        "A smaller model for the partials of calls, beside the main one for finals and files. Empty is none.",
        _any_text,
        "a model",
    ),
    _row(
        "idle_seconds",
        "300",
        "The worker leaves this long after its last job.",
        _number(float, 0, 1e9),
        "seconds, 0 or more",
    ),
    _row(
        "spool_dir",
        "",
        "Folder for uploads in progress; empty is `napscribe-UID` under the system's folder for temporary files. Not a tmpfs.",
        _folder(f"{tempfile.gettempdir()}/napscribe-{os.getuid()}"),
        "a folder",
    ),
    _row(
        "spool_mb",
        "8192",
        "Quota of all uploads in progress together, MiB.",
        _number(int, 1, 1 << 30),
        "MiB, 1 or more",
    ),
    _row("max_upload_mb", "2048", "Largest single upload, MiB.", _number(int, 1, 1 << 30), "MiB, 1 or more"),
    _row(
        "max_audio_seconds",
        "21600",
        "Longest recording, decoded.",
        _number(float, 1, 1e7),
        "seconds, 1 or more",
    ),
    _row(
        "max_queue",
        "64",
        "Requests that wait in each lane; one more gets 429.",
        _number(int, 1, 100_000),
        "1 to 100000",
    ),
    _row(
        "queue_seconds",
        "900",
        "Longest wait in a lane before 503.",
        _number(float, 1, 1e6),
        "seconds, 1 or more",
    ),
    _row(
        "start_stall_seconds",
        "120",
        "A starting worker that shows no progress for this long is killed.",
        _number(float, 0.1, 1e5),
        "seconds, 0.1 or more",
    ),
    _row(
        "threads",
        "0",
        "CPU threads of the engine; 0 is its own choice: half of the cores for the embedded model, all of them for Qwen3-ASR on a CPU, two beside a GPU.",
        _number(int, 0, 1024),
        "0 to 1024",
    ),
    _row(
        "cpus",
        "",
        "Cores that the worker keeps to, `0-3,8`; `gpu` is those on the card's NUMA node. Empty: wherever the gateway may run.",
        _cores,
        f"cores of {format_cores(os.sched_getaffinity(0))}, as in 0-3,8, or gpu",
    ),
    _row(
        "gpu_memory_mb",
        "0",
        "Bound on GPU memory: weights, sequences and working memory, MiB (CUDA's own context comes on top); 0 is what is free.",
        _number(int, 0, 1 << 24),
        "0, or MiB",
    ),
    _row(
        "aligner",
        "auto",
        "Model for exact word times, a hub id or a folder: loaded when words are asked for. `auto` is the published one "
        "beside a model of `Qwen/` on CUDA; `none` estimates.",
        _text,
        "auto, none, a hub id or a folder",
    ),
    _row(
        "latency_log",
        "",
        "File that gets one JSON line per live utterance: where the time to its final went. Empty is none.",
        _file,
        "a file in a folder that exists",
    ),
    _row("debug_timing", "0", "1 logs every step of the engine: length, lanes, results.", _number(int, 0, 1), "0 or 1"),
    _row(
        "wyoming_port",
        "0",
        "Port for Home Assistant (Wyoming); 0 is off. 10300 is usual.",
        _number(int, 0, 65535),
        "0 to 65535",
    ),
    _row(
        "wyoming_host",
        "127.0.0.1",
        "Address of that port. Wyoming knows no keys: beyond loopback, anybody who reaches it can use it.",
        _text,
        "an address",
    ),
    _row(
        "runtime_dir",
        "",
        "Parent of the private folder with the sockets; empty is the system's folder for temporary files.",
        _folder(tempfile.gettempdir()),
        "a folder",
    ),
    _row(
        "worker",
        "",
        "Command line of another worker, for tests and adapters; empty is ours.",
        _any_text,
        "a command line",
    ),
    _row(
        "twilio_auth_token",
        "",
        "Auth token of the Twilio account: `/twilio` then checks the signature of its handshakes.",
        _any_text,
        "a token",
    ),
    _row(
        "call_webhook",
        "",
        "URL that gets what is said in calls as POSTs of JSON.",
        _url,
        "a URL with http:// or https://",
    ),
    _row(
        "call_webhook_secret",
        "",
        "Key of the HMAC-SHA256 of each POST's body in `x-napscribe-signature`.",
        _any_text,
        "any text",
    ),
)


def load(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment. Raises SettingsError for an unknown ``NAPSCRIBE_*`` name or a value out of range."""
    known = {setting.name: setting for setting in TABLE}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            stems = [known_name.removeprefix(PREFIX) for known_name in known]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), stems, n=1)
            hint = f" Did you mean {PREFIX}{close[0]}?" if close else f" Known: {', '.join(known)}."
            raise SettingsError(f"Unknown setting {name}.{hint}")
    values = {setting.field: _value(setting, environ) for setting in TABLE}
    return Settings(**values)


def _value(setting: Setting, environ: Mapping[str, str]) -> Any:
    text = environ.get(setting.name, setting.default).strip()
    if not text:
        text = setting.default
    try:
        return setting.parse(text)
    except ValueError:
        raise SettingsError(f"{setting.name}={text!r} does not fit: it takes {setting.takes}.") from None


def readme_table() -> str:
    """The table of the README, as Markdown."""
    rows = [f"| `{s.name}` | {f'`{s.default}`' if s.default else ''} | {s.help} |" for s in TABLE]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])
