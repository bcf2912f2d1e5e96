"""POST /v1/completions"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from rose_dist.engine.protocol import Generate, TokenLogprobs
from rose_dist.frontend.api.exchange import Exchange, Step, respond
from rose_dist.frontend.api.http import DONE, error_events, event, read_body
from rose_dist.frontend.api.service import Service, decode_request, new_id, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import ApiError
from rose_dist.frontend.formats.base import TextDelta
from rose_dist.frontend.formats.plain import PlainParser
from rose_dist.frontend.schema.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)


class Completions:
    """ASGI endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = msgspec.json.Decoder(CompletionRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        await service.admit()
        body = await read_body(scope, receive)
        request = decode_request(self._decoder, body)
        service.check_model(request)
        prompts = request.prompts()
        encoded = await service.beside_the_loop(len(body), self._encode_all, request, prompts)
        heads = [self._head(request, prompt) for prompt in prompts for _ in range(request.choices)]

        async def start() -> tuple[Exchange, CompletionAnswer]:
            exchange = self._start(scope, request, encoded)
            return exchange, CompletionAnswer(service, request, exchange, heads)

        await respond(start, scope, receive, send, stream=bool(request.stream))

    def _encode_all(self, request: CompletionRequest, prompts: list[str | list[int]]) -> list[list[int]]:
        return [self._encode(request, prompt) for prompt in prompts]

    def _encode(self, request: CompletionRequest, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = self._service.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        self._service.check_prompt(prompt, "prompt", request)
        return prompt

    def _head(self, request: CompletionRequest, prompt: str | list[int]) -> str:
        """What `echo` puts before a choice's text."""
        if not request.echo:
            return ""
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    def _start(self, scope: Scope, request: CompletionRequest, prompts: list[list[int]]) -> Exchange:
        tokenizer = self._service.tokenizer
        sampling = request.sampling(vocab_size=tokenizer.vocab_size, logprobs=request.logprobs)
        own_stop_ids = request.stop_token_ids or []
        stop_ids = own_stop_ids if request.ignore_eos else [*tokenizer.eos_ids, *own_stop_ids]
        stops = request.stop_strings()
        base = random_hex(8)
        generates: list[Generate] = []
        choices: list[Choice] = []
        for prompt in prompts:
            for choice in range(request.choices):
                index = len(choices)
                generates.append(
                    request.generate(f"{base}-{index}", prompt, sampling, stop_ids=stop_ids, choice=choice)
                )
                parser = PlainParser(tokenizer.detokenizer())
                choices.append(Choice(index, parser, stops=stops, hidden_stop_ids=frozenset(stop_ids)))
        return Exchange(self._service, scope, request, generates=generates, choices=choices)


class CompletionAnswer:
    """An `Answer`."""

    def __init__(self, service: Service, request: CompletionRequest, exchange: Exchange, heads: list[str]) -> None:
        self._exchange = exchange
        self._tokenizer = service.tokenizer
        self._heads = heads
        self._logprobs = request.logprobs is not None
        self._include_usage = request.include_usage
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._model = request.model
        self._texts: list[list[str]] = [[head] for head in heads]
        self._offsets = [0] * len(heads)

    def begin(self) -> list[bytes]:
        return [self._event(index, head) for index, head in enumerate(self._heads) if head]

    def events(self, step: Step) -> list[bytes]:
        events = []
        for choice, deltas in step:
            text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
            if text or choice.finish_reason is not None:
                logprobs = self._take_logprobs(choice) if self._logprobs else None
                events.append(self._event(choice.index, text, choice.finish_reason, logprobs))
        return events

    def end(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        chunk = self._completion([])
        chunk.usage = self._exchange.usage()
        return [event(chunk), DONE]

    def broken_off(self, error: ApiError) -> list[bytes]:
        return error_events(error)

    def add(self, step: Step) -> None:
        for choice, deltas in step:
            self._texts[choice.index] += [delta.text for delta in deltas if isinstance(delta, TextDelta)]

    def whole(self) -> Completion:
        answer = self._completion(
            [
                CompletionChoice(
                    index=choice.index,
                    text="".join(self._texts[choice.index]),
                    logprobs=self._take_logprobs(choice) if self._logprobs else None,
                    finish_reason=choice.finish_reason,
                )
                for choice in self._exchange.choices
            ]
        )
        answer.usage = self._exchange.usage()
        return answer

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices)

    def _event(
        self, index: int, text: str, finish_reason: str | None = None, logprobs: CompletionLogprobs | None = None
    ) -> bytes:
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        chunk = self._completion([choice])
        chunk.usage = None if self._include_usage else UNSET
        return event(chunk)

    def _take_logprobs(self, choice: Choice) -> CompletionLogprobs:
        taken = choice.take_logprobs()
        tokens = [self._tokenizer.token_text(token_id) for token_id, _ in taken]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(token)
        return CompletionLogprobs(
            tokens, [entry.logprob for _, entry in taken], [self._top(entry) for _, entry in taken], offsets
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._tokenizer.token_text(token_id): logprob for token_id, logprob in entry.top}
