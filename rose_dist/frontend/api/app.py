"""The ASGI application: routes and layers."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from rose_dist.frontend.api.chat import ChatCompletions
from rose_dist.frontend.api.completions import Completions
from rose_dist.frontend.api.gateway import Gateway
from rose_dist.frontend.api.responses import Responses
from rose_dist.frontend.api.service import Service
from rose_dist.frontend.api.status import Status


def build_app(service: Service) -> ASGIApp:
    status = Status(service)
    responses = Responses(service)
    router = Router(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(service), methods=["POST"]),
            Route("/v1/completions", Completions(service), methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve),
            Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/experts/rebalance", status.rebalance, methods=["POST"]),
            Route("/v1/models", status.models),
            Route("/v1/models/{name:path}", status.model),
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/version", status.version),
            Route("/openapi.json", status.openapi),
            Route("/", status.page),
        ]
    )
    app: ASGIApp = Gateway(router, service)
    if service.config.cors_origins:
        app = CORSMiddleware(app, allow_origins=service.config.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return app
