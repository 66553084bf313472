"""The composition root: the only module that knows all the others. Builds them in order and takes them down in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.middleware import Middleware

from gateway.auth import Guard, KeyRing
from gateway.channel import Channel
from gateway.context import RequestContext
from gateway.dispatch import Dispatcher
from gateway.errors_http import HANDLERS, ErrorBoundary
from gateway.lifecycle import Phase, Policy
from gateway.model import ServedModel, served_model
from gateway.private_folder import PrivateFolder
from gateway.reclaim import Reclaimer
from gateway.spool import Spool
from gateway.status import Status
from gateway.streams.doors import Doors
from gateway.streams.hub import Hub
from gateway.supervisor import Supervisor, worker_command
from gateway.transcriptions import Limits, Transcriptions
from shared import journal
from shared.errors import NapscribeError, ShuttingDown
from shared.journal import log
from shared.messages import Event, Failed, JobEvent
from shared.settings import Settings
from shared.streams import StreamEvent

MIB = 1024 * 1024
CLOSE_SECONDS = 10.0
"""Answers on their way when the server stops get so long to leave."""


@dataclass(frozen=True)
class Ground:
    """What the gateway stands on: everything that touches the disk to be made, and so is made before the loop runs."""

    settings: Settings
    model: ServedModel
    sockets: Path
    spool: Spool


@contextmanager
def ground(settings: Settings) -> Iterator[Ground]:
    """Folders of this gateway, and the leftovers of dead ones swept. Raises OSError if they cannot be made."""
    journal.bind(process="gateway", pid=os.getpid())
    with (
        PrivateFolder(settings.runtime_dir, "napscribe-run-") as runtime,
        contextlib.closing(Spool(settings.spool_dir, settings.spool_mb * MIB)) as spool,
    ):
        spool.sweep()
        if spool.warning:
            log("spool", level="warning", warning=spool.warning)
        yield Ground(settings, served_model(settings.model), runtime.path, spool)


@dataclass(frozen=True)
class Gateway:
    """A running gateway without its listening socket."""

    app: Starlette
    supervisor: Supervisor
    dispatcher: Dispatcher
    hub: Hub


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
    policy = Policy(settings.idle_seconds, settings.start_stall_seconds, settings.stop_seconds)
    command = worker_command(channel, base.model.spec, settings.threads, settings.worker)
    hub = Hub(channel, settings.idle_seconds)
    supervisor = Supervisor(policy, channel, command, (hub, dispatcher), reclaimer.worker_gone)
    dispatcher.supervisor = hub.supervisor = supervisor
    try:
        yield Gateway(_application(base, supervisor, dispatcher, hub, reclaimer), supervisor, dispatcher, hub)
    finally:
        dispatcher.refuse_all(ShuttingDown("The server is shutting down.", retry_after=5))
        await supervisor.aclose()
        reclaimer.close()
        channel.close()


def _application(
    base: Ground, supervisor: Supervisor, dispatcher: Dispatcher, hub: Hub, reclaimer: Reclaimer
) -> Starlette:
    settings, spool, model = base.settings, base.spool, base.model
    keys = KeyRing(settings.api_keys)
    limits = Limits(settings.max_upload_mb * MIB, settings.max_audio_seconds)
    doors = [
        *Status(supervisor, dispatcher, model, lambda: spool.used_bytes).routes(),
        *Transcriptions(supervisor, dispatcher, spool, model, limits).routes(),
        *Doors(hub, keys, model).routes(),
    ]
    middleware = [
        Middleware(RequestContext, seen=reclaimer.request_seen),
        Middleware(ErrorBoundary),
        Middleware(Guard, keys=keys),
    ]
    return Starlette(routes=doors, middleware=middleware, exception_handlers=HANDLERS)


async def serve(base: Ground) -> None:
    """Run until SIGTERM or SIGINT. Raises OSError if the address is taken."""
    settings = base.settings
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with gateway(base) as running:
        server = Server(
            running.app,
            address=settings.host,
            port=settings.port,
            interface=Interfaces.ASGINL,
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
        running.dispatcher.refuse_all(ShuttingDown("The server is shutting down.", retry_after=5))
        server.stop()  # type: ignore[no-untyped-call]
        with contextlib.suppress(asyncio.TimeoutError, NapscribeError):
            await asyncio.wait_for(serving, CLOSE_SECONDS)


def _announce(settings: Settings, model: ServedModel) -> None:
    log("serving", address=f"http://{settings.host}:{settings.port}", model=model.id)
    if settings.host not in {"127.0.0.1", "::1", "localhost"} and not settings.api_keys:
        log(
            "open to the network",
            level="warning",
            warning=f"Listening on {settings.host} without keys: anybody who reaches it can use it. Set NAPSCRIBE_API_KEYS.",
        )
