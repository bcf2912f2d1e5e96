"""The real openai client against two real ranks whose model emits a known Harmony script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rose_dist.frontend.formats.base import Conversation
from rose_dist.frontend.formats.harmony_render import render
from rose_dist.frontend.formats.harmony_vocabulary import HarmonyVocabulary
from tests.serve import script
from tests.serve.server import Server

pytestmark = pytest.mark.mpi(2)

MODEL = "scripted-model"
BLOCK = 16
TOOLS: list[dict[str, Any]] = [
    {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in script.TOOLS
]
CHAT_TOOLS: Any = [{"type": "function", "function": tool} for tool in TOOLS]
RESPONSES_TOOLS: Any = [{"type": "function", **tool} for tool in TOOLS]
SCHEMAS = {tool.name: tool.parameters for tool in script.TOOLS}
RESULTS = {call.name: call.result for call in script.CALLS}
QUESTION = [{"role": "user", "content": script.QUESTION}]
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": script.CITY_SCHEMA}}

_tickets = count(101)


@pytest.fixture(scope="module")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(scripted, 2, "--kv-tokens", "8192", folder=tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def ticket() -> int:
    """Of a tool loop that the server has not seen."""
    return next(_tickets)


@pytest.fixture(scope="module")
def vocabulary() -> HarmonyVocabulary:
    return HarmonyVocabulary.find()


@dataclass
class Turn:
    """One answer of Chat Completions, streamed or not."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Id, name and arguments."""
    finish_reason: str | None = None
    usage: Any = None
    pieces: int = 0

    @classmethod
    def of_chunks(cls, chunks: Iterable[Any]) -> Turn:
        turn = cls()
        for chunk in chunks:
            turn.usage = chunk.usage or turn.usage
            for choice in chunk.choices:
                turn.pieces += 1
                turn.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                turn.content += choice.delta.content or ""
                turn.finish_reason = choice.finish_reason or turn.finish_reason
                for piece in choice.delta.tool_calls or ():
                    if piece.id:
                        turn.calls.append((piece.id, piece.function.name, ""))
                    call_id, name, arguments = turn.calls[piece.index]
                    turn.calls[piece.index] = (call_id, name, arguments + piece.function.arguments)
        return turn

    @classmethod
    def of_completion(cls, completion: Any) -> Turn:
        (choice,) = completion.choices
        message = choice.message
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", "")
        return cls(reasoning, message.content or "", calls, choice.finish_reason, completion.usage)

    def message(self, *, with_reasoning: bool) -> dict[str, Any]:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in self.calls
        ]
        message = {"role": "assistant", "content": self.content or None, "tool_calls": calls}
        return message | ({"reasoning_content": self.reasoning} if with_reasoning else {})


def chat(server: Server, messages: Any, *, stream: bool = False, **fields: Any) -> Turn:
    create = server.client().chat.completions.create
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 400, **fields}
    if stream:
        return Turn.of_chunks(create(**asked, stream=True, stream_options={"include_usage": True}))
    return Turn.of_completion(create(**asked))


def chat_loop(server: Server, ticket: int, *, stream: bool, with_reasoning: bool) -> list[Turn]:
    """Answers calls until there are none."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": script.instructions(ticket)},
        {"role": "user", "content": script.REQUEST},
    ]
    turns = []
    while len(turns) <= len(script.CALLS):
        turns.append(turn := chat(server, messages, stream=stream, tools=CHAT_TOOLS))
        messages.append(turn.message(with_reasoning=with_reasoning))
        messages += [
            {"role": "tool", "tool_call_id": call_id, "content": RESULTS[name]} for call_id, name, _ in turn.calls
        ]
        if not turn.calls:
            break
    return turns


def prompt_of(conversation: Conversation, vocabulary: HarmonyVocabulary) -> list[int]:
    return render(conversation, vocabulary, date.today())


@pytest.mark.parametrize("with_reasoning", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_of_three_calls_ends_in_the_answer(
    server: Server, ticket: int, vocabulary: HarmonyVocabulary, stream: bool, with_reasoning: bool
) -> None:
    turns = chat_loop(server, ticket, stream=stream, with_reasoning=with_reasoning)
    assert [turn.calls[0][1:] for turn in turns[:-1]] == [(call.name, call.arguments) for call in script.CALLS]
    assert [turn.finish_reason for turn in turns] == ["tool_calls"] * 3 + ["stop"]
    assert [turn.reasoning for turn in turns] == [*(call.reasoning for call in script.CALLS), script.CONCLUSION]
    assert [turn.content for turn in turns] == ["", "", "", script.ANSWER]
    if stream:
        # Tokens that wait for the frontend share a piece, on a busy machine many; a turn held back would have five at
        # most: role, reasoning, a call's name, its arguments or an answer, and the end.
        assert all(turn.pieces > 5 for turn in turns)
    replies = [vocabulary.encode_with_control(reply) for _, reply in script.lessons(ticket)[:4]]
    end, last = 0, []
    for results, (turn, reply) in enumerate(zip(turns, replies, strict=True)):
        prompt = prompt_of(script.tool_loop(ticket, results, with_reasoning=with_reasoning), vocabulary)
        usage = turn.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(reply))
        assert usage.completion_tokens_details.reasoning_tokens == len(vocabulary.encode(turn.reasoning))
        cached = usage.prompt_tokens_details.cached_tokens
        if with_reasoning:
            # All blocks of the last prompt and of what was sampled, but for the token that was sampled last.
            assert prompt[:end] == last
            assert results == 0 or cached == (end - 1) // BLOCK * BLOCK
        else:
            assert cached >= end // BLOCK * BLOCK
        last = [*prompt, *reply] if with_reasoning else prompt
        end = len(last)


@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_of_responses(server: Server, ticket: int, vocabulary: HarmonyVocabulary, stream: bool) -> None:
    create = server.client().responses.create
    fields: dict[str, Any] = {
        "model": MODEL,
        "instructions": script.instructions(ticket),
        "tools": RESPONSES_TOOLS,
        "temperature": 0,
        "input": script.REQUEST,
    }
    responses = []
    while True:
        response = [*create(**fields, stream=True)][-1].response if stream else create(**fields)
        responses.append(response)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        fields["previous_response_id"] = response.id
        fields["input"] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
        ]
    assert [(r.output[1].name, r.output[1].arguments) for r in responses[:-1]] == [
        (call.name, call.arguments) for call in script.CALLS
    ]
    assert [r.output[0].content[0].text for r in responses[:-1]] == [call.reasoning for call in script.CALLS]
    assert responses[-1].output_text == script.ANSWER
    assert {r.status for r in responses} == {"completed"}
    for before, after in pairwise(responses):
        assert after.usage.input_tokens_details.cached_tokens == (before.usage.total_tokens - 1) // BLOCK * BLOCK
        reasoning = before.output[0].content[0].text
        assert before.usage.output_tokens_details.reasoning_tokens == len(vocabulary.encode(reasoning))


def test_what_is_no_answer_yet(server: Server) -> None:
    """Cut in the reasoning, cut in the answer, and ended by a stop string, which reasoning may hold."""
    whole = chat(server, QUESTION)
    assert (whole.reasoning, whole.content) == (script.PLAIN_REASONING, script.PLAIN_ANSWER)
    early = chat(server, QUESTION, max_completion_tokens=6)
    assert (early.finish_reason, early.content) == ("length", "")
    assert script.PLAIN_REASONING.startswith(early.reasoning)
    late = chat(server, QUESTION, max_completion_tokens=whole.usage.completion_tokens - 3, stream=True)
    assert late.finish_reason == "length"
    # The cut is inside the bytes of the emoji, which becomes U+FFFD.
    assert script.PLAIN_ANSWER.startswith(late.content.removesuffix("\ufffd"))
    stopped = chat(server, QUESTION, stop=["Paris"])
    assert (stopped.finish_reason, stopped.content) == ("stop", script.PLAIN_ANSWER.split("Paris")[0])
    assert stopped.reasoning == script.PLAIN_REASONING


def test_choices_and_their_log_probabilities(server: Server) -> None:
    completion = server.client().chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, temperature=1, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in completion.choices] == [script.PLAIN_ANSWER] * 2
    tokens = completion.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == script.PLAIN_ANSWER
    assert all(-0.05 < token.logprob <= 0 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens)


# Hotter, the model may reason until its tokens run out before it makes the call: what comes before a call is free.
@pytest.mark.parametrize("temperature", [0, 0.3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_required_call_is_made_although_the_model_would_answer(
    server: Server, ticket: int, temperature: float, stream: bool
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": script.instructions(ticket)},
        {"role": "user", "content": script.REQUEST},
    ]
    for number, call in enumerate(script.CALLS):
        made = Turn(reasoning=call.reasoning, calls=[(str(number), call.name, call.arguments)])
        messages.append(made.message(with_reasoning=True))
        messages.append({"role": "tool", "tool_call_id": str(number), "content": call.result})
    turn = chat(
        server, messages, stream=stream, tools=CHAT_TOOLS, tool_choice="required", temperature=temperature, seed=7
    )
    assert turn.finish_reason == "tool_calls"
    ((_, name, arguments),) = turn.calls
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("temperature", [0, 0.3])
@pytest.mark.parametrize("name", list(SCHEMAS))
def test_a_named_function_is_called_whatever_the_model_would_call(
    server: Server, ticket: int, temperature: float, name: str
) -> None:
    messages = [
        {"role": "system", "content": script.instructions(ticket)},
        {"role": "user", "content": script.REQUEST},
    ]
    choice = {"type": "function", "function": {"name": name}}
    turn = chat(server, messages, tools=CHAT_TOOLS, tool_choice=choice, temperature=temperature, seed=3)
    ((_, called, arguments),) = turn.calls
    assert called == name
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(("temperature", "seed"), [(0, 0), (1, 1), (1, 2)])
def test_an_answer_fits_its_schema_although_the_model_would_write_prose(
    server: Server, temperature: float, seed: int
) -> None:
    turn = chat(server, QUESTION, response_format=CITY, temperature=temperature, seed=seed)
    assert turn.finish_reason == "stop"
    jsonschema.validate(json.loads(turn.content), script.CITY_SCHEMA)
    response = server.client().responses.create(
        model=MODEL,
        input=script.QUESTION,
        text={"format": {"type": "json_schema", "name": "city", "schema": script.CITY_SCHEMA}},
        temperature=temperature,
        extra_body={"seed": seed},
    )
    jsonschema.validate(json.loads(response.output_text), script.CITY_SCHEMA)
