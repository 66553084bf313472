"""Doors that tell and steer: ``/health``, ``/ready``, ``/v1/models``, ``/api/ps``. Asking never wakes the worker."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.files.form import resolve_model
from gateway.jobs.dispatch import Dispatcher
from gateway.life.lifecycle import Phase
from gateway.life.process import resident_bytes
from gateway.life.supervisor import Supervisor
from gateway.model import ServedModel
from gateway.streams.hub import Hub
from gateway.truth import truth
from shared.errors import Conflict
from shared.version import __version__


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


class Status:
    """The status doors, bound to what they report on."""

    def __init__(
        self,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        hub: Hub,
        model: ServedModel,
        spool_used: Callable[[], int],
    ) -> None:
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._hub = hub
        self._model = model
        self._spool_used = spool_used
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.model),
            Route("/api/ps", self.ps),
            Route("/api/ps/{model_id:path}", self.load, methods=["POST"]),
            Route("/api/ps/{model_id:path}", self.unload, methods=["DELETE"]),
        ]

    async def health(self, _request: Request) -> Response:
        """The gateway is alive. No state is read, nothing is written."""
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """200 when a request would be served, asleep or awake; 503 while the worker rests after failures."""
        phase = self._supervisor.phase
        if phase in {Phase.COOLDOWN, Phase.CLOSED}:
            return json_response({"status": phase.value}, 503, {"retry-after": "1"})
        return json_response({"status": "ready", "worker": phase.value})

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Raises ModelNotFound for any id but ours and its aliases."""
        resolve_model(request.path_params["model_id"], self._model.id)
        return json_response(self._card())

    async def ps(self, _request: Request) -> Response:
        body = {
            "version": __version__,
            "model": self._model.id,
            "worker": self._supervisor.report(),
            "queue": {**self._dispatcher.report(), "live": self._hub.report()},
            "spool_bytes": self._spool_used(),
            "gateway_resident_bytes": resident_bytes("self"),
        }
        return json_response(body)

    async def load(self, request: Request) -> Response:
        """Start the worker and wait until it is ready."""
        resolve_model(request.path_params["model_id"], self._model.id)
        worker = await self._supervisor.load()
        return json_response({"status": "ready", "generation": worker.generation, "pid": worker.pid})

    async def unload(self, request: Request) -> Response:
        """Drain and unload; ``?force=1`` ends the worker at once. Raises Conflict if a new request kept it."""
        resolve_model(request.path_params["model_id"], self._model.id)
        force = truth(request.query_params.get("force", "")) is True
        if not await self._supervisor.unload(force=force):
            raise Conflict("A new request took the worker back.", hint="Try again, or add ?force=1.")
        return json_response({"status": "unloaded"})

    def _card(self) -> dict[str, object]:
        return {"id": self._model.id, "object": "model", "created": self._created, "owned_by": "napscribe"}
