"""Endpoints about the server: models, health, metrics, version, description, and the page to chat."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import rose_dist
from rose_dist.frontend.api import openapi
from rose_dist.frontend.api.http import JsonResponse
from rose_dist.frontend.api.service import Service
from rose_dist.frontend.errors import NotFoundError
from rose_dist.frontend.metrics import CONTENT_TYPE
from rose_dist.frontend.schema.common import Model, ModelList

_PAGE = files("rose_dist.frontend") / "page" / "index.html"


class Status:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return JsonResponse(ModelList([self._model(name) for name in self._service.config.names]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.config.names:
            raise NotFoundError(f"The model `{name}` does not exist here", param="model", code="model_not_found")
        return JsonResponse(self._model(name))

    async def health(self, request: Request) -> Response:
        """200 once a replica has loaded the model, 503 before, while draining and when the engine has failed.
        `degraded` names the replicas that are gone; requests are answered by the others.
        """
        service = self._service
        missing = service.client.missing()
        if service.failed:
            state = "failed"
        elif service.draining:
            state = "draining"
        else:
            state = "loading" if not service.client.ready else "degraded" if missing else "ok"
        health: dict[str, object] = {"status": state}
        if missing and len(service.client.replicas) > 1:
            health["missing"] = [{"replica": replica.number, "reason": replica.gone} for replica in missing]
        return JsonResponse(health, status_code=200 if state in ("ok", "degraded") else 503)

    async def rebalance(self, request: Request) -> Response:
        """Have the experts rearranged over the ranks by the load seen; 202 at once, the metrics tell of the end."""
        await self._service.admit()
        self._service.client.rebalance()
        return JsonResponse({"status": "started"}, status_code=202)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": rose_dist.__version__})

    async def openapi(self, request: Request) -> Response:
        return JsonResponse(openapi.description(self._service.config.names))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE.read_bytes())

    def _model(self, name: str) -> Model:
        service = self._service
        length = min(service.client.max_prompt_room) if service.client.ready else None
        return Model(id=name, created=service.created, max_model_len=length)
