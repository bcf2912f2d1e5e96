"""Tool calls and structured output through the real openai client, on both chat formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.formats.harmony_codec import HarmonyCodec
from rose_dist.frontend.formats.harmony_vocabulary import SIZE, HarmonyVocabulary
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def create(frontend: Frontend, **fields: Any) -> Any:
    with frontend.client() as client:
        answer = client.chat.completions.create(
            **{"model": "tiny-chat", "messages": MESSAGES, "tools": TOOLS, **fields}
        )
        return list(answer) if fields.get("stream") else answer


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "lines"


@pytest.fixture(scope="module")
def caller(config: FrontendConfig, tokenizer: Tokenizer, report: Path) -> Iterator[Frontend]:
    script = tokenizer.encode_template(f"I look it up.\n{CALL}\n{CALL}")
    with running(config, [StubConfig(script=script, report=str(report))]) as started:
        yield started


def test_whole_answer(caller: Frontend) -> None:
    choice = create(caller).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up.\n"
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("function", "get_weather", {"city": "Paris"})
    ] * 2
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_stream(caller: Frontend) -> None:
    chunks = create(caller, stream=True)
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.id is not None:
                assert piece.index == len(calls)
                assert (piece.type, piece.function.name, piece.function.arguments) == ("function", "get_weather", "")
                calls[piece.index] = {"id": piece.id, "arguments": ""}
            else:
                assert piece.function.name is None
                calls[piece.index]["arguments"] += piece.function.arguments
    assert [json.loads(call["arguments"]) for call in calls.values()] == [{"city": "Paris"}] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_where_parallel_ones_are_not_wanted(caller: Frontend) -> None:
    assert len(create(caller, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_no_calls_where_tools_are_switched_off(caller: Frontend) -> None:
    choice = create(caller, tool_choice="none").choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert CALL in choice.message.content


def test_cut_short_is_length(caller: Frontend) -> None:
    choice = create(caller, max_tokens=35).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_history_with_calls_is_rendered(caller: Frontend, tokenizer: Tokenizer, report: Path) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
    ]
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ]
    create(caller, messages=history)
    prompt = tokenizer.decode(json.loads(report.read_text().splitlines()[-1])["prompt"], special=True)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in prompt
    assert "<think>\nHm.\n</think>" in prompt
    assert "<|im_start|>tool\nsun<|im_end|>" in prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
        {"extra_body": {"structured_outputs": {"regex": "[ab]+"}}},
        {"extra_body": {"structured_outputs": {"grammar": "start: /[ab]+/"}}},
        {"extra_body": {"structured_outputs": {"json": {"type": "object"}}}},
    ],
)
def test_what_must_be_enforced_reaches_the_engine(caller: Frontend, report: Path, fields: dict[str, Any]) -> None:
    create(caller, **fields)
    generate = json.loads(report.read_text().splitlines()[-1])
    assert json.loads(generate["grammar"])["grammars"]


HARMONY_REPLY = (
    "<|channel|>analysis<|message|>They ask for 🙂 weather.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


def test_harmony_end_to_end(tmp_path: Path) -> None:
    """A checkpoint in OpenAI's layout, which has no tokenizer.json."""
    (tmp_path / "gpt-oss").mkdir()
    (tmp_path / "gpt-oss" / "config.json").write_text(json.dumps({"vocab_size": SIZE}))
    vocabulary = HarmonyVocabulary.find()
    script = vocabulary.encode_with_control(HARMONY_REPLY)
    report = tmp_path / "report"
    stub = StubConfig(script=script, tokens_per_step=3, report=str(report))
    with running(FrontendConfig(model=str(tmp_path / "gpt-oss")), [stub]) as frontend:
        answer = create(frontend, model="gpt-oss", reasoning_effort="high")
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning == "They ask for 🙂 weather."
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(
            vocabulary.encode("They ask for 🙂 weather.")
        )
        chunks = create(frontend, model="gpt-oss", stream=True)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        with frontend.client() as client:
            text = client.completions.create(model="gpt-oss", prompt="Hi", max_tokens=200).choices[0].text
        assert "They ask for 🙂 weather." in text
        assert "<|" not in text
        status, body, _ = frontend.post(
            "/v1/chat/completions", {"model": "gpt-oss", "messages": MESSAGES, "reasoning_effort": "frantic"}
        )
        assert status == 400, body
        strict = {**TOOLS[0]["function"], "strict": True}
        create(frontend, model="gpt-oss", tools=[{"type": "function", "function": strict}])
        with frontend.client() as client:
            client.responses.create(model="gpt-oss", input="Hi", tools=[{"type": "function", **strict}])
        strict["parameters"] = {"type": "object", "not": {"required": ["city"]}}
        tools = [{"type": "function", "function": strict}]
        status, body, _ = frontend.post(
            "/v1/chat/completions", {"model": "gpt-oss", "messages": MESSAGES, "tools": tools}
        )
        assert (status, body["error"]["param"]) == (400, "tools"), body
        assert "get_weather can't be enforced" in body["error"]["message"]
    told = [json.loads(line) for line in report.read_text().splitlines()]
    held = ['"city"' in generate.get("grammar", "") for generate in told if generate["type"] == "generate"]
    assert held == [False, False, False, True, True]
    prompt = vocabulary.decode(told[1]["prompt"])
    assert "Reasoning: high" in prompt
    assert prompt.endswith("<|start|>assistant")


def test_harmony_codec_decodes_what_it_encodes() -> None:
    codec = HarmonyCodec(HarmonyVocabulary.find())
    for text in ("<|start|>assistant<|end|>", "Grüße 🙂 你好"):
        ids = codec.encode(text)
        assert max(ids) < 199_998
        assert codec.decode(ids) == text
    assert codec.vocab_size == SIZE
