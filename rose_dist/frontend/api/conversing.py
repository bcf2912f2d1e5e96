"""From a conversation to a running exchange, for the endpoints that speak in messages."""

from __future__ import annotations

from starlette.types import Scope

from rose_dist.frontend.api.exchange import Exchange
from rose_dist.frontend.api.service import Service, random_hex
from rose_dist.frontend.choice import Choice
from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import ChatFormat, Conversation, FormatError
from rose_dist.frontend.schema.sampling import GenerationFields


async def converse(
    service: Service,
    scope: Scope,
    request: GenerationFields,
    conversation: Conversation,
    *,
    body_size: int,
    logprobs: int | None,
    one_call: bool,
    watched: bool = True,
) -> Exchange:
    """Render the conversation and start its choices in the engine.

    Args:
        body_size: bytes of the request.
        logprobs: as in `SamplingParams`.
        one_call: at most one tool call an answer.
        watched: it ends when the client leaves.

    Raises:
        BadRequestError: the conversation can't be rendered, is too long, or a field does not fit the model.
    """
    chat_format = service.chat_format
    size = max(body_size, sum(len(message.content) + len(message.reasoning) for message in conversation.messages))
    prompt, grammar = await service.beside_the_loop(size, _render, chat_format, conversation)
    service.check_prompt(prompt, "messages", request)
    sampling = request.sampling(vocab_size=service.tokenizer.vocab_size, logprobs=logprobs)
    own_stop_ids = request.stop_token_ids or []
    stop_ids = own_stop_ids if request.ignore_eos else [*chat_format.stop_ids, *own_stop_ids]
    stops = request.stop_strings()
    hidden = frozenset(own_stop_ids) - chat_format.stop_ids
    base = random_hex(8)
    generates, choices = [], []
    for i in range(request.choices):
        generates.append(
            request.generate(f"{base}-{i}", prompt, sampling, stop_ids=stop_ids, choice=i, grammar=grammar)
        )
        parser = chat_format.parser(conversation)
        choices.append(Choice(i, parser, stops=stops, hidden_stop_ids=hidden, one_call=one_call))
    return Exchange(service, scope, request, generates=generates, choices=choices, watched=watched)


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
            str(error), param="tools" if conversation.response_format is None else "response_format"
        ) from error
