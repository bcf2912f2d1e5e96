"""Small pieces of ASGI: reading a bounded body, JSON answers, events of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope

from rose_dist.frontend.errors import ApiError, BodyTooLargeError, ClientGoneError

MAX_BODY_BYTES = 8_000_000
_LINGER_S = 2.0

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """
    Raises:
        BodyTooLargeError: as soon as it is known that the body has more than `MAX_BODY_BYTES`.
        ClientGoneError: the client left before it had sent everything.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > MAX_BODY_BYTES:
            raise BodyTooLargeError(MAX_BODY_BYTES)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(MAX_BODY_BYTES)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def discard_body(receive: Receive) -> None:
    """Read on for a moment: a connection closed while its client still sends takes the answer away with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: msgspec.Struct) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


def error_events(error: ApiError) -> list[bytes]:
    """How a stream of chunks that has already begun tells of an error."""
    return [b"data: " + error.body() + b"\n\n", DONE]
