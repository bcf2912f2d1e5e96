"""The outermost ASGI layer: API keys, request ids, errors as OpenAI's bodies, one log line a request."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Awaitable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose_dist.frontend.api.http import discard_body
from rose_dist.frontend.api.service import Service, random_hex
from rose_dist.frontend.config import hash_api_key
from rose_dist.frontend.errors import (
    ApiError,
    BadRequestError,
    BodyTooLargeError,
    ClientGoneError,
    EngineError,
    InvalidApiKeyError,
)

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("rose_dist.frontend.access")
_POLLED = ("/health", "/metrics")
"""Asked every few seconds by machines; told only at debug level."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; only ever logged."""


class Gateway:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"an ASGI scope of type {scope['type']} is not served")
        arrival = scope["rose.arrival"] = time.monotonic()
        scope["app"] = self  # makes Starlette's router raise HTTPException instead of answering in plain text
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = random_hex(16).encode()
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own: it runs once a token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            return send(message)

        self._service.active += 1
        try:
            self._authorise(scope["path"], headers.get(b"authorization", b""))
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            status = status or _CLIENT_CLOSED
        except Exception as error:
            if status:
                raise
            await _send_error(_as_api_error(error, scope), receive, send_with_id)
        finally:
            self._service.active -= 1
            self._record(scope, status, time.monotonic() - arrival, request_id)

    def _authorise(self, path: str, authorization: bytes) -> None:
        known = self._service.config.api_key_hashes
        if not known or not path.startswith("/v1"):
            return
        scheme, _, key = authorization.decode("latin-1").partition(" ")
        given = hash_api_key(key.strip())
        matches = [hmac.compare_digest(given, one) for one in known]  # all of them: the time tells nothing
        if scheme.lower() != "bearer" or not any(matches):
            raise InvalidApiKeyError

    def _record(self, scope: Scope, status: int, seconds: float, request_id: bytes) -> None:
        route = scope.get("route")
        self._service.metrics.http[scope["method"], route.path if route else "other", status] += 1
        level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
        if access_logger.isEnabledFor(level):
            prompt, output = scope.get("rose.tokens", (0, 0))
            access_logger.log(
                level,
                "%s %s %d %.1f ms, %d prompt and %d output tokens, id %s",
                scope["method"],
                scope["path"],
                status,
                seconds * 1000,
                prompt,
                output,
                request_id.decode(),
            )


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        api_error = BadRequestError(
            f"{error.detail}: {scope['method']} {scope['path']}. "
            + (f"Allowed here: {allowed}" if allowed else "GET /openapi.json lists what there is")
        )
        api_error.status = error.status_code
        api_error.headers = dict(error.headers or {})
        return api_error
    if isinstance(error, RecursionError):  # nothing else here recurses but what follows a request's own nesting
        return BadRequestError("The request is nested too deeply")
    logger.error("A request failed inside the server", exc_info=error)
    return EngineError("The server failed on this request; its log has the cause")


async def _send_error(error: ApiError, receive: Receive, send: Send) -> None:
    body = error.body()
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if isinstance(error, BodyTooLargeError):
        await discard_body(receive)
    await send({"type": "http.response.body", "body": b""})
