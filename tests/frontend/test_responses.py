"""The Responses API through the real openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig

SCRIPT = (
    "<think>\nThey want weather.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "lines"


@pytest.fixture(scope="module")
def server(config: FrontendConfig, tokenizer: Tokenizer, report: Path) -> Iterator[Frontend]:
    bounded = msgspec.structs.replace(config, stored_responses=3)
    stub = StubConfig(script=tokenizer.encode_template(SCRIPT), report=str(report), step_s=0.001)
    with running(bounded, [stub]) as started:
        yield started


@pytest.fixture
def client(server: Frontend) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny-chat", "input": "Weather?", "tools": TOOLS, **fields})


def last_prompt(report: Path, tokenizer: Tokenizer) -> str:
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return tokenizer.decode([line for line in lines if line["type"] == "generate"][-1]["prompt"], special=True)


def test_whole_response(client: openai.OpenAI) -> None:
    response = create(client, metadata={"a": "b"}, instructions="Be brief.", max_output_tokens=500)
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "They want weather.\n"
    assert message.content[0].text == response.output_text == "I look it up.\n"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Köln"}, "completed")
    assert call.call_id.startswith("call_")
    assert (response.metadata, response.instructions, response.max_output_tokens) == ({"a": "b"}, "Be brief.", 500)
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens > 3
    assert usage.input_tokens_details.cached_tokens > 0


def test_events_come_in_order(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    without_repeats = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert without_repeats == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    for kind, done in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        (end,) = (event for event in events if event.type == f"response.{kind}.done")
        assert "".join(event.delta for event in deltas) == getattr(end, done)
        assert {(e.item_id, e.output_index) for e in deltas} == {(end.item_id, end.output_index)}
    final = events[-1].response
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in final.output] == [item.id for item in added]
    assert all(item.status == "in_progress" for item in added)


def test_stream_helper_of_the_client_accumulates(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny-chat", input="Weather?", tools=TOOLS) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "I look it up.\n"


def test_cut_short_is_incomplete(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]
    assert list(create(client, max_output_tokens=4, stream=True))[-1].type == "response.incomplete"


def test_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    response = create(client, top_logprobs=1, include=["message.output_text.logprobs"])
    logprobs = response.output[1].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).strip() == "I look it up."
    assert len(logprobs[0].top_logprobs) == 1


def test_a_tool_loop_by_previous_response_id(client: openai.OpenAI, report: Path, tokenizer: Tokenizer) -> None:
    first = create(client, instructions="Only now.")
    call = first.output[-1]
    second = create(
        client,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
    )
    assert second.previous_response_id == first.id
    prompt = last_prompt(report, tokenizer)
    assert "Only now." not in prompt
    turns = prompt.split("<|im_start|>")[2:]  # after the tools
    assert turns[0] == "user\nWeather?<|im_end|>\n"
    assert turns[1].startswith("assistant\n<think>\nThey want weather.\n\n</think>\n\nI look it up.\n")
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in turns[1]
    assert turns[2] == "tool\nsun<|im_end|>\n"
    third = create(client, previous_response_id=second.id, input="Thanks")
    assert len(last_prompt(report, tokenizer).split("<|im_start|>")) == 8
    assert third.status == "completed"


def test_items_in_the_input(client: openai.OpenAI, report: Path, tokenizer: Tokenizer) -> None:
    create(
        client,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rain."}]},
            {"role": "user", "content": "Two"},
        ],
    )
    turns = last_prompt(report, tokenizer).split("<|im_start|>")[2:]
    assert [turn.split("\n")[0] for turn in turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert "Hm" in turns[2]
    assert "get_weather" in turns[2]
    assert turns[4] == "assistant\nRain.<|im_end|>\n"


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    response = create(client)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    assert create(client, store=False).store is False


def test_the_store_is_bounded(client: openai.OpenAI) -> None:
    ids = [create(client).id for _ in range(4)]
    with pytest.raises(openai.NotFoundError, match="dropped after 3"):
        client.responses.retrieve(ids[0])
    assert [client.responses.retrieve(i).id for i in ids[1:]] == ids[1:]
    kept_out = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        create(client, previous_response_id=kept_out.id)


def test_background_and_cancel(client: openai.OpenAI, server: Frontend) -> None:
    response = create(client, background=True)
    assert response.status == "in_progress"
    wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
    assert client.responses.retrieve(response.id).output_text == "I look it up.\n"
    endless = create(client, background=True, extra_body={"ignore_eos": True}, max_output_tokens=3500)
    wait_for(lambda: server.metric("num_requests_running") == 1)
    with pytest.raises(openai.BadRequestError, match="still running"):
        create(client, previous_response_id=endless.id)
    assert client.responses.cancel(endless.id).status == "cancelled"
    wait_for(lambda: server.metric("num_requests_running") == 0)
    assert client.responses.retrieve(endless.id).status == "cancelled"
    done = create(client)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(done.id)


def test_engine_error(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    stub = StubConfig(script=tokenizer.encode("Hello"), error_after=2, step_s=0.005)
    with running(config, [stub]) as server, server.client() as client:
        events = list(create(client, stream=True))
        assert events[-1].type == "response.failed"
        assert "told to fail" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            create(client)
        background = create(client, background=True)
        wait_for(lambda: client.responses.retrieve(background.id).status == "failed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"background": True, "stream": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 4096}, "max_output_tokens"),
    ],
)
def test_bad_field(server: Frontend, fields: dict[str, Any], param: str) -> None:
    status, body, _ = server.post("/v1/responses", {"model": "tiny-chat", "input": "Hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "get_weather"}},
    ],
)
def test_what_must_be_enforced_reaches_the_engine(client: openai.OpenAI, report: Path, fields: dict[str, Any]) -> None:
    create(client, **fields)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert lines[-1]["grammar"]
