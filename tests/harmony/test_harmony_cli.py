import json

import pytest
from click.testing import CliRunner
from openai_harmony import Role

from rose_dist.cli.main import rose
from rose_dist.errors import RoseError
from rose_dist.vocabulary import VARIABLE


def run(*arguments: str, stdin: str):
    return CliRunner().invoke(rose, ["harmony", *arguments], input=stdin)


PARAMETERS = {"type": "object", "properties": {"c": {"type": "string"}}}
CONVERSATION = json.dumps(
    {
        "model": "gpt-oss",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "東京?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Use the tool.",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}],
        "reasoning_effort": "low",
    }
)
REPLY = (
    "<|channel|>analysis<|message|>Use the tool.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"c": "東京"}<|call|>'
)


def test_render_gives_ids_and_text(library):
    result = run("render", "--date", "2025-06-28", stdin=CONVERSATION)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert library.decode_utf8(answer["ids"]) == answer["text"]
    assert "Current date: 2025-06-28\n\nReasoning: low" in answer["text"]
    assert "<|start|>user<|message|>Weather in 東京?<|end|>" in answer["text"]
    assert "<|channel|>analysis<|message|>Use the tool.<|end|>" in answer["text"]
    assert "<|message|>{}<|call|><|start|>functions.get_weather to=assistant" in answer["text"]
    assert "type get_weather = (_: {\nc?: string,\n}) => any;" in answer["text"]


def test_render_text(library):
    result = run("render", "--date", "2025-06-28", "--text", stdin=CONVERSATION)
    assert result.output.startswith("<|start|>system<|message|>You are ChatGPT")
    assert result.output.endswith("<|start|>assistant\n")


@pytest.mark.parametrize("as_ids", [False, True])
def test_parse(library, as_ids):
    stdin = json.dumps(library.encode(REPLY, allowed_special="all")) if as_ids else f"{REPLY}\n"
    result = run("parse", "--tools", "get_weather, other", stdin=stdin)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    theirs = library.parse_messages_from_completion_tokens(library.encode(REPLY, allowed_special="all"), Role.ASSISTANT)
    assert [(m["channel"], m["recipient"], m["content"]) for m in answer["messages"]] == [
        (m.channel, m.recipient, m.content[0].text) for m in theirs
    ]
    function = {"name": "get_weather", "arguments": '{"c": "東京"}'}
    assert answer["message"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Use the tool.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert answer["finish_reason"] == "tool_calls"


def test_parse_without_the_tool_calls_nothing():
    answer = json.loads(run("parse", stdin=REPLY).output)
    assert "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("stdin", ["", "<|channel|>final<|message|>cut of"])
def test_parse_of_a_truncated_reply(stdin):
    assert json.loads(run("parse", stdin=stdin).output)["finish_reason"] == "length"


def test_parse_of_text_that_begins_with_a_bracket():
    assert json.loads(run("parse", stdin="[1, x]<|return|>").output)["message"]["content"] == "[1, x]"


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("{", "truncated"),
        ('{"messages": [{"role": "robot"}]}', "robot"),
        ('{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "extreme"}', "low, medium and high"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "a b"}}]}', "a b"),
    ],
)
def test_render_says_what_is_wrong(stdin, message):
    result = run("render", stdin=stdin)
    assert isinstance(result.exception, RoseError)
    assert message in str(result.exception)


def test_missing_vocabulary_names_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    result = run("parse", stdin="")
    assert isinstance(result.exception, RoseError)
    assert VARIABLE in str(result.exception)
