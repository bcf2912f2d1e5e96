"""POST /v1/responses, and GET, DELETE and cancel of one."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rose_dist.frontend.api.conversing import converse
from rose_dist.frontend.api.exchange import Exchange, respond
from rose_dist.frontend.api.http import JsonResponse, read_body
from rose_dist.frontend.api.response_answer import ResponseAnswer, new_response_id
from rose_dist.frontend.api.response_store import ResponseStore
from rose_dist.frontend.api.service import Service, decode_request
from rose_dist.frontend.errors import ApiError, BadRequestError
from rose_dist.frontend.formats.base import Message
from rose_dist.frontend.schema.response_object import ResponseObject
from rose_dist.frontend.schema.responses import ResponsesRequest

_CANCEL_POLL_S = 0.2
"""How often a background response looks whether another frontend was told to cancel it."""


class Responses:
    """ASGI endpoint for creation; the other methods are Starlette endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore(service.config.stored_responses, service.shared and service.shared / "responses")
        self._decoder = msgspec.json.Decoder(ResponsesRequest)
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        await service.admit()
        body = await read_body(scope, receive)
        request = decode_request(self._decoder, body)
        service.check_model(request)
        if request.background and (request.stream or not request.stored):
            raise BadRequestError("background needs store to be true and stream to be false", param="background")
        history = self._store.history(request.previous_response_id) if request.previous_response_id else []
        logprobs = request.logprob_count()
        turns = [*history, *request.input_messages()]

        def keep(response: ResponseObject, turn: Message) -> None:
            if request.background:
                self._store.update(response, [*turns, turn])
            elif request.stored:
                self._store.put(response, [*turns, turn])

        async def start() -> tuple[Exchange, ResponseAnswer]:
            exchange = await converse(
                service,
                scope,
                request,
                request.conversation(history),
                body_size=len(body),
                logprobs=logprobs,
                one_call=request.parallel_tool_calls is False,
                watched=not request.background,
            )
            response = _response(request)
            return exchange, ResponseAnswer(service, response, exchange, logprobs=logprobs is not None, on_end=keep)

        if request.background:
            exchange, answer = await start()
            self._start_in_background(exchange, answer, turns)
            await JsonResponse(answer.response)(scope, receive, send)
        else:
            await respond(start, scope, receive, send, stream=bool(request.stream))

    async def retrieve(self, request: Request) -> Response:
        return Response(self._store.get(request.path_params["response_id"]), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.cancel(response_id)
        await asyncio.sleep(2 * _CANCEL_POLL_S)
        return await self.retrieve(request)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    def _start_in_background(self, exchange: Exchange, answer: ResponseAnswer, turns: list[Message]) -> None:
        self._store.put(answer.response, turns, running=True)
        loop = asyncio.get_running_loop()
        for job in (self._run(exchange, answer, turns), self._watch_cancel(exchange, answer.response)):
            task = loop.create_task(job)
            self._background.add(task)  # the loop itself holds tasks only weakly
            task.add_done_callback(self._background.discard)

    async def _run(self, exchange: Exchange, answer: ResponseAnswer, turns: list[Message]) -> None:
        self._service.active += 1  # a drain waits for it
        try:
            while not exchange.ended:
                answer.add(await exchange.step())
            answer.whole()
        except ApiError as error:
            exchange.close(error)
            answer.fail(error)
            self._store.update(answer.response, turns)
        except _CancelledError as error:
            exchange.close(error)
            answer.response.status = "cancelled"
            self._store.update(answer.response, turns)
        finally:
            self._service.active -= 1
            exchange.close()

    async def _watch_cancel(self, exchange: Exchange, response: ResponseObject) -> None:
        while response.status == "in_progress":
            if self._store.is_cancelled(response.id):
                exchange.abort(_CancelledError())
                return
            await asyncio.sleep(_CANCEL_POLL_S)


class _CancelledError(Exception):
    """A client cancelled a background response."""


def _response(request: ResponsesRequest) -> ResponseObject:
    """The response before any output, with the request's settings as OpenAI repeats them."""
    return ResponseObject(
        id=new_response_id(),
        created_at=int(time.time()),
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=request.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": request.reasoning.summary if request.reasoning else None,
        },
        store=request.stored,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=request.text or {"format": {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=list(request.tools or []),
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )
