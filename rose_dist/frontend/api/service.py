"""What every endpoint needs: the model's parts, and whether a request may come in."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.engine_client import EngineClient
from rose_dist.frontend.errors import BadRequestError, NotFoundError, UnavailableError
from rose_dist.frontend.formats.base import ChatFormat
from rose_dist.frontend.metrics import Metrics
from rose_dist.frontend.schema.sampling import GenerationFields
from rose_dist.frontend.tokenizer import TextCodec

P = ParamSpec("P")
T = TypeVar("T")

_OTHERS_SECONDS = 5.0
_LARGE_BODY = 64_000
"""Bytes of a request's body."""

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")


@dataclass
class Service:
    config: FrontendConfig
    tokenizer: TextCodec
    chat_format: ChatFormat
    client: EngineClient
    metrics: Metrics
    shared: Path | None = None
    """As in `LaunchSpec`."""
    created: int = field(default_factory=lambda: int(time.time()))
    draining_since: float | None = None
    """When the drain began, as `time.monotonic` counts."""
    failed: bool = False
    """The engine has ended, or is about to."""
    active: int = 0
    """HTTP requests being answered."""

    @property
    def draining(self) -> bool:
        return self.draining_since is not None

    async def beside_the_loop(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function`'s result, from a thread where a request is so large that it would hold up all streams."""
        if size < _LARGE_BODY:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    async def admit(self) -> None:
        """Behind one port with others, wait a little: another process of the server may have told that it is ready.

        Raises:
            UnavailableError: the engine has failed, the server drains, or no replica has loaded the model.
        """
        if self.failed:
            raise UnavailableError("The engine has failed")
        if self.draining:
            raise UnavailableError("The server is shutting down")
        if self.shared is not None:
            until = time.monotonic() + _OTHERS_SECONDS
            while not self.client.ready and time.monotonic() < until:
                await asyncio.sleep(0.05)
        if not self.client.ready:
            raise UnavailableError(self.client.why_not_ready())

    def check_model(self, request: GenerationFields) -> None:
        if request.model not in self.config.names:
            raise NotFoundError(
                f"The model `{request.model}` does not exist here; this server has {', '.join(self.config.names)}",
                param="model",
                code="model_not_found",
            )

    def check_prompt(self, prompt: list[int], param: str, request: GenerationFields) -> None:
        """
        Raises:
            BadRequestError: a token id is outside the vocabulary, or there is no room for the prompt and the longest
                answer asked for, or one token.
        """
        if not prompt:
            raise BadRequestError(f"{param}: the prompt has no tokens", param=param)
        if max(prompt) >= self.tokenizer.vocab_size:
            raise BadRequestError(
                f"{param}: {max(prompt)} is not a token id; ids are 0 to {self.tokenizer.vocab_size - 1}", param=param
            )
        wanted = request.token_limit()
        context, capacity = self.client.max_prompt_room
        for limit, what in sorted(((context, "the model's context"), (capacity, "the KV cache"))):
            if len(prompt) >= limit:
                raise BadRequestError(
                    f"The prompt has {len(prompt)} tokens, but {what} holds {limit} tokens of prompt and output; "
                    f"a prompt may have at most {limit - 1}",
                    param=param,
                    code="context_length_exceeded",
                )
            if wanted is not None and len(prompt) + wanted > limit:
                raise BadRequestError(
                    f"The prompt has {len(prompt)} tokens and the answer may have {wanted}, but {what} holds {limit} "
                    f"tokens of prompt and output; {request.limit_field} may be at most {limit - len(prompt)}",
                    param=request.limit_field,
                    code="context_length_exceeded",
                )


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """
    Raises:
        BadRequestError: not JSON, or a field of the wrong type or out of range; the message says what is allowed.
    """
    try:
        return decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequestError(f"The request body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        param = (path[1] if path else "") or _missing_field(message)
        reason = message[: path.start()] if path else message
        raise BadRequestError(f"{param}: {reason}" if param else reason, param=param or None) from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}") from error


def _missing_field(message: str) -> str:
    match = re.search(r"missing required field `(.*)`", message)
    return match[1] if match else ""


_generator = random.Random(os.urandom(32))


def random_hex(length_bytes: int) -> str:
    """Unique, not secret: without the system call of `secrets`."""
    return f"{_generator.getrandbits(8 * length_bytes):0{2 * length_bytes}x}"


def new_id(prefix: str) -> str:
    return f"{prefix}-{random_hex(12)}"
