"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send

from rose_dist.frontend.api.chat_answer import ChatAnswer
from rose_dist.frontend.api.exchange import Exchange, respond
from rose_dist.frontend.api.http import read_body
from rose_dist.frontend.api.service import Service, decode_request, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import Conversation, FormatError
from rose_dist.frontend.schema.chat import ChatRequest

_LARGE_BODY = 64_000
"""Bytes from which on rendering and encoding would hold up other streams, and go to a thread."""


class ChatCompletions:
    """ASGI endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = msgspec.json.Decoder(ChatRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.admit()
        body = await read_body(scope, receive, service.config.max_body_bytes)
        request = decode_request(self._decoder, body)
        service.check_model(request)
        conversation = request.conversation()
        if len(body) < _LARGE_BODY:
            prompt = self._render(conversation)
        else:
            prompt = await asyncio.to_thread(self._render, conversation)
        service.check_prompt(prompt, "messages")
        exchange = self._start(scope, receive, request, conversation, prompt)
        await respond(
            exchange, ChatAnswer(service, request, exchange), scope, receive, send, stream=bool(request.stream)
        )

    def _render(self, conversation: Conversation) -> list[int]:
        try:
            return self._service.chat_format.render(conversation)
        except FormatError as error:
            raise BadRequestError(str(error), param="messages") from error

    def _start(
        self,
        scope: Scope,
        receive: Receive,
        request: ChatRequest,
        conversation: Conversation,
        prompt: list[int],
    ) -> Exchange:
        service = self._service
        count = service.choices_within_limit(request.choices)
        sampling = request.sampling(vocab_size=service.tokenizer.vocab_size, logprobs=request.logprob_count())
        own_stop_ids = request.stop_token_ids or []
        stop_ids = own_stop_ids if request.ignore_eos else [*service.chat_format.stop_ids, *own_stop_ids]
        stops = request.stop_strings()
        base = random_hex(8)
        generates = [request.generate(f"{base}-{i}", prompt, sampling, stop_ids, i) for i in range(count)]
        hidden = frozenset(own_stop_ids) - service.chat_format.stop_ids
        choices = [
            Choice(i, service.chat_format.parser(conversation), stops=stops, hidden_stop_ids=hidden)
            for i in range(count)
        ]
        return Exchange(service, scope, receive, request, generates=generates, choices=choices)
