"""From a conversation to a running exchange, for the endpoints that speak in messages."""

from __future__ import annotations

from starlette.types import Receive, Scope

from rose_dist.frontend.api.exchange import Exchange
from rose_dist.frontend.api.service import Service, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import ChatFormat, Conversation, FormatError
from rose_dist.frontend.schema.sampling import GenerationFields


async def converse(
    service: Service,
    scope: Scope,
    receive: Receive | None,
    request: GenerationFields,
    conversation: Conversation,
    *,
    body_size: int,
    logprobs: int | None,
    one_call: bool,
) -> Exchange:
    """Render the conversation and start its choices in the engine.

    Args:
        receive: where a client's leaving shows; None if the exchange goes on without it.
        body_size: bytes of the request.
        logprobs: as in `SamplingParams`.
        one_call: at most one tool call an answer.

    Raises:
        BadRequestError: the conversation can't be rendered, is too long, or a field does not fit the model.
    """
    chat_format = service.chat_format
    prompt, grammar = await service.beside_the_loop(body_size, _render, chat_format, conversation)
    service.check_prompt(prompt, "messages")
    count = service.choices_within_limit(request.choices)
    sampling = request.sampling(vocab_size=service.tokenizer.vocab_size, logprobs=logprobs)
    own_stop_ids = request.stop_token_ids or []
    stop_ids = own_stop_ids if request.ignore_eos else [*chat_format.stop_ids, *own_stop_ids]
    stops = request.stop_strings()
    hidden = frozenset(own_stop_ids) - chat_format.stop_ids
    base = random_hex(8)
    generates, choices = [], []
    for i in range(count):
        generates.append(
            request.generate(f"{base}-{i}", prompt, sampling, stop_ids=stop_ids, choice=i, grammar=grammar)
        )
        parser = chat_format.parser(conversation)
        choices.append(Choice(i, parser, stops=stops, hidden_stop_ids=hidden, one_call=one_call))
    return Exchange(service, scope, receive, request, generates=generates, choices=choices)


def _render(chat_format: ChatFormat, conversation: Conversation) -> tuple[list[int], str | None]:
    """The prompt's ids and the grammar of the answer."""
    try:
        prompt = chat_format.render(conversation)
    except FormatError as error:
        raise BadRequestError(str(error), param="messages") from error
    try:
        return prompt, chat_format.grammar(conversation)
    except FormatError as error:
        raise BadRequestError(
            str(error), param="tools" if conversation.required_tools else "response_format"
        ) from error
