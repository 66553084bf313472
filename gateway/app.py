"""The composition root: the only module that knows all the others. Builds them in order and takes them down in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from granian.constants import Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.middleware import Middleware

from gateway import console
from gateway.address import url
from gateway.answers.errors_http import HANDLERS, ErrorBoundary
from gateway.auth import OPEN_PATHS, Guard, KeyRing
from gateway.context import RequestContext
from gateway.files.nas import Nas
from gateway.files.reception import Limits, Reception
from gateway.files.spool import Spool
from gateway.files.transcriptions import Transcriptions
from gateway.jobs.dispatch import Dispatcher
from gateway.latency import LatencyLog
from gateway.life.channel import Channel
from gateway.life.lifecycle import Phase, Policy
from gateway.life.process import worker_command
from gateway.life.supervisor import Supervisor
from gateway.model import ServedModel, aligner, live_model, served_model
from gateway.private_folder import PrivateFolder
from gateway.reclaim import Reclaimer
from gateway.status import Status
from gateway.streams.call_webhook import CallWebhook
from gateway.streams.calls import Calls
from gateway.streams.doors import Doors
from gateway.streams.hub import Hub
from shared import journal
from shared.errors import NapscribeError, ShuttingDown
from shared.journal import log
from shared.messages import Event, Failed, JobEvent
from shared.settings import Settings, SettingsError
from shared.streams import StreamEvent

T = TypeVar("T")
MIB = 1024 * 1024
_RUN = "napscribe-run-"
READ_BUFFER_BYTES = 65536
"""Of each connection. Granian's own 400 KiB make 200 uploads at once cost 80 MB."""
CLOSE_SECONDS = 10.0
"""Answers on their way when the server stops get so long to leave."""


@dataclass(frozen=True)
class Ground:
    """What the gateway stands on: everything that touches the disk to be made, and so is made before the loop runs."""

    settings: Settings
    model: ServedModel
    live_model: str
    aligner: str
    sockets: Path
    spool: Spool
    latency: LatencyLog | None = None


@contextmanager
def ground(settings: Settings) -> Iterator[Ground]:
    """Models that can be meant, folders of this gateway, and the leftovers of dead ones swept. Raises SettingsError, OSError."""
    journal.bind(process="gateway", pid=os.getpid())
    model = served_model(settings.model)
    small, times = live_model(settings.live_model), aligner(settings.aligner, model)
    with ExitStack() as stack:
        runtime = stack.enter_context(
            _named("NAPSCRIBE_RUNTIME_DIR", lambda: PrivateFolder(settings.runtime_dir, _RUN))
        )
        quota = settings.spool_mb * MIB
        spool = stack.enter_context(closing(_named("NAPSCRIBE_SPOOL_DIR", lambda: Spool(settings.spool_dir, quota))))
        latency = stack.enter_context(_latency_log(settings.latency_log))
        runtime.sweep()
        spool.sweep()
        if spool.warning:
            log("spool", level="warning", warning=spool.warning)
        yield Ground(settings, model, small, times, runtime.path, spool, latency)


def _named(setting: str, make: Callable[[], T]) -> T:
    """Make a folder; an error says which setting chose its place. Raises SettingsError."""
    try:
        return make()
    except OSError as error:
        raise SettingsError(f"{setting}: {error.filename or 'the folder'} cannot be used: {error.strerror}.") from None


@contextmanager
def _latency_log(path: Path | None) -> Iterator[LatencyLog | None]:
    if path is None:
        yield None
        return
    with contextlib.closing(LatencyLog(path)) as latency:
        yield latency


@dataclass(frozen=True)
class Gateway:
    """A running gateway without its listening socket."""

    app: Starlette
    supervisor: Supervisor
    dispatcher: Dispatcher
    hub: Hub

    def refuse_all(self) -> None:
        """The end is near: nobody is left waiting."""
        error = ShuttingDown("The server is shutting down.", retry_after=5)
        self.dispatcher.refuse_all(error)
        self.hub.refuse_all(error)


@asynccontextmanager
async def gateway(base: Ground) -> AsyncIterator[Gateway]:
    """Everything but the HTTP server. On leaving, the worker is stopped and reaped."""
    settings = base.settings

    def route(event: Event, _payload: object) -> None:
        if isinstance(event, JobEvent):
            dispatcher.handle(event)
        elif isinstance(event, StreamEvent):
            hub.handle(event)
        elif isinstance(event, Failed):
            if not hub.handle(event):
                dispatcher.handle(event)
        else:
            supervisor.handle(event)

    channel = Channel(base.sockets, route, lambda *garbage: supervisor.garbage(*garbage))
    dispatcher = Dispatcher(channel, settings.max_queue, settings.queue_seconds)
    reclaimer = Reclaimer(lambda: supervisor.phase in {Phase.STOPPED, Phase.COOLDOWN})
    policy = Policy(settings.idle_seconds, settings.start_stall_seconds)
    command = worker_command(channel, _worker_options(base), settings.worker)
    hub = Hub(channel, settings.idle_seconds, base.latency)
    supervisor = Supervisor(policy, channel, command, (hub, dispatcher), reclaimer.worker_gone, base.model.languages)
    dispatcher.supervisor = hub.supervisor = supervisor
    webhook = CallWebhook(settings.call_webhook, settings.call_webhook_secret)
    calls = Calls(webhook.post) if settings.call_webhook else Calls()
    running = Gateway(_application(base, supervisor, dispatcher, hub, calls, reclaimer), supervisor, dispatcher, hub)
    try:
        yield running
    finally:
        running.refuse_all()
        await webhook.aclose()
        await supervisor.aclose()
        reclaimer.close()
        channel.close()


def _worker_options(base: Ground) -> list[str]:
    settings, model = base.settings, base.model
    options: dict[str, object] = {
        "--model": model.spec,
        "--live-model": base.live_model,
        "--aligner": base.aligner,
        "--threads": settings.threads,
        "--cpus": settings.cpus,
        "--gpu-memory-mb": settings.gpu_memory_mb,
        "--debug-timing": settings.debug_timing,
    }
    return [part for name, value in options.items() for part in (name, str(value))]


def _application(
    base: Ground, supervisor: Supervisor, dispatcher: Dispatcher, hub: Hub, calls: Calls, reclaimer: Reclaimer
) -> Starlette:
    settings, spool, model = base.settings, base.spool, base.model
    keys = KeyRing(settings.api_keys)
    limits = Limits(settings.max_upload_mb * MIB, settings.max_audio_seconds)
    reception = Reception(supervisor, dispatcher, spool, limits)
    doors = [
        *console.routes(),
        *Status(supervisor, dispatcher, hub, model, lambda: spool.used_bytes).routes(),
        *Transcriptions(reception, model).routes(),
        *Nas(reception).routes(),
        *Doors(hub, keys, model, calls, settings.twilio_auth_token).routes(),
    ]
    middleware = [
        Middleware(RequestContext, seen=reclaimer.request_seen),
        Middleware(ErrorBoundary),
        Middleware(Guard, keys=keys, open_paths=OPEN_PATHS | console.PATHS),
    ]
    return Starlette(routes=doors, middleware=middleware, exception_handlers=HANDLERS)


async def serve(base: Ground) -> None:
    """Run until SIGTERM or SIGINT. Raises OSError if the address is taken."""
    settings = base.settings
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with gateway(base) as running, _wyoming(base, running):
        server = Server(
            running.app,
            address=settings.host,
            port=settings.port,
            interface=Interfaces.ASGINL,
            http1_settings=HTTP1Settings(max_buffer_size=READ_BUFFER_BYTES),
            log_enabled=False,
            backlog=1024,
        )
        serving = asyncio.ensure_future(server.serve())
        stopping = asyncio.ensure_future(stop.wait())
        _announce(settings, base.model)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            stopping.cancel()
            await serving
            return
        log("stopping")
        running.refuse_all()
        server.stop()  # type: ignore[no-untyped-call]
        with contextlib.suppress(asyncio.TimeoutError, NapscribeError):
            await asyncio.wait_for(serving, CLOSE_SECONDS)


@asynccontextmanager
async def _wyoming(base: Ground, running: Gateway) -> AsyncIterator[None]:
    """Home Assistant's door, where it is wanted; its code is loaded only then."""
    settings = base.settings
    if not settings.wyoming_port:
        yield
        return
    from gateway.streams.wyoming_server import WyomingServer

    server = WyomingServer(running.hub, base.model)
    await server.start(settings.wyoming_host, settings.wyoming_port)
    log("serving", address=f"tcp://{settings.wyoming_host}:{settings.wyoming_port}", protocol="wyoming")
    try:
        yield
    finally:
        await server.stop()


def _announce(settings: Settings, model: ServedModel) -> None:
    log("serving", address=url(settings.host, settings.port), model=model.id)
    if settings.host not in {"127.0.0.1", "::1", "localhost"} and not settings.api_keys:
        log(
            "open to the network",
            level="warning",
            warning=f"Listening on {settings.host} without keys: anybody who reaches it can use it. Set NAPSCRIBE_API_KEYS.",
        )
