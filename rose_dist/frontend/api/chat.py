"""POST /v1/chat/completions"""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from rose_dist.frontend.api.chat_answer import ChatAnswer
from rose_dist.frontend.api.conversing import converse
from rose_dist.frontend.api.exchange import Exchange, respond
from rose_dist.frontend.api.http import read_body
from rose_dist.frontend.api.service import Service, decode_request
from rose_dist.frontend.schema.chat import ChatRequest


class ChatCompletions:
    """ASGI endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        await service.admit()
        body = await read_body(scope, receive)
        request = decode_request(self._decoder, body)
        service.check_model(request)

        async def start() -> tuple[Exchange, ChatAnswer]:
            exchange = await converse(
                service,
                scope,
                request,
                request.conversation(),
                body_size=len(body),
                logprobs=request.logprob_count(),
                one_call=request.parallel_tool_calls is False,
            )
            return exchange, ChatAnswer(service, request, exchange)

        await respond(start, scope, receive, send, stream=bool(request.stream))
