"""Errors that a client sees, in OpenAI's shape."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """Ends a request with an HTTP status and OpenAI's error body."""

    status = 400
    type = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(ErrorBody(self.message, self.type, self.param, self.code)))


class BadRequestError(ApiError):
    """The request can't be served as it is; the message says what is allowed."""


class InvalidApiKeyError(ApiError):
    status = 401

    def __init__(self) -> None:
        super().__init__(
            "Missing or wrong API key: send `Authorization: Bearer <key>` with a key that this server was started with",
            code="invalid_api_key",
        )


class NotFoundError(ApiError):
    status = 404


class BodyTooLargeError(ApiError):
    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than this server's limit of {limit} bytes", code="body_too_large")


RETRY_AFTER_S = 1
"""What 429 tells clients; a queue of short requests moves on within a second."""


class OverloadedError(ApiError):
    """The waiting queue is full; nothing was generated."""

    status = 429
    type = "rate_limit_error"

    def __init__(self) -> None:
        super().__init__(
            f"The server's request queue is full; try again in {RETRY_AFTER_S} s",
            code="overloaded",
            headers={"retry-after": str(RETRY_AFTER_S)},
        )


class EngineError(ApiError):
    status = 500
    type = "server_error"


class UnavailableError(ApiError):
    """The model is still loading, or the server is shutting down."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message, code="unavailable", headers={"retry-after": str(retry_after_s)})


class ReplicaLostError(UnavailableError):
    """The replica that worked on the request is gone, and the request's output with it."""

    def __init__(self) -> None:
        super().__init__(
            "The replica that worked on this request was lost; send the request again", retry_after_s=RETRY_AFTER_S
        )
        self.code = "replica_lost"


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody left to answer."""
