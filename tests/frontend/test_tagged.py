"""Tool calls between tags: whatever the pieces, the same calls, and nothing lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_dist.engine.grammar import GrammarCompiler
from rose_dist.frontend.formats.base import Conversation, Delta, FormatError, Message, ResponseFormat, TextDelta, Tool
from rose_dist.frontend.formats.jinja import JinjaFormat
from rose_dist.frontend.tokenizer import Tokenizer
from rose_dist.vocabulary import load_token_bytes

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool(name="time")
ASK = Conversation(messages=[Message(role="user", content="Weather?")], tools=[WEATHER, TIME])

PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'

# output → (content, calls)
CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "No call.": ("No call.", []),
    f"<tool_call>\n{PARIS}\n</tool_call>": ("", [("get_weather", '{"city": "Paris"}')]),
    f"I look.\n<tool_call>{PARIS}</tool_call>": ("I look.\n", [("get_weather", '{"city": "Paris"}')]),
    f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>": (
        "",
        [("get_weather", '{"city": "Paris"}')] * 2,
    ),
    '<tool_call>{"name":"get_weather","arguments":{"a":{"b":["}",1,{}]},"q":"\\"}\\\\"}}</tool_call>': (
        "",
        [("get_weather", '{"a":{"b":["}",1,{}]},"q":"\\"}\\\\"}')],
    ),
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>Done.': ("Done.", [("time", "{}")]),
    '<tool_call>{"name": "time"}</tool_call>': ("", [("time", "{}")]),
    '<tool_call>{"arguments": {"city": "Köln"}, "name": "get_weather"}</tool_call>': (
        "",
        [("get_weather", '{"city": "Köln"}')],
    ),
    '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": 1}"}</tool_call>': (
        "",
        [("get_weather", '{"city": 1}')],
    ),
    '<tool_call>{"name": "get_weather", "parameters": {"city": "🙂"}}</tool_call>': (
        "",
        [("get_weather", '{"city": "🙂"}')],
    ),
    # cut short: what is known so far
    '<tool_call>{"name": "get_weather", "arguments": {"ci': ("", [("get_weather", '{"ci')]),
    '<tool_call>{"name": "get_wea': ('<tool_call>{"name": "get_wea', []),
    f"<tool_call>{PARIS}</tool_c": ("", [("get_weather", '{"city": "Paris"}')]),
    "a <tool_ca": ("a <tool_ca", []),
    # what JSON's escapes can do
    '<tool_call>{"name": "get\\u005fweather", "arguments": {}}</tool_call>': ("", [("get_weather", "{}")]),
    '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "time"}</tool_call>': ("", [("time", '{"a": "?"}')]),
    '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        [],
    ),
    '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>': (
        '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>',
        [],
    ),
    # not calls: shown as they are
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "<tool_call>get the weather</tool_call> ok": ("<tool_call>get the weather</tool_call> ok", []),
    "<tool_call>[1, 2]</tool_call>": ("<tool_call>[1, 2]</tool_call>", []),
    "a </tool_call> b": ("a </tool_call> b", []),
    # what follows the call's last bracket is content
    '<tool_call>{"name": "time", "arguments": {}}} x {"a": 1}</tool_call>': ('} x {"a": 1}', [("time", "{}")]),
    '<tool_call>{"name": "time", "arguments": {}} It is noon.': ("It is noon.", [("time", "{}")]),
}


def read(
    tokenizer: Tokenizer, ids: Iterable[int], conversation: Conversation = ASK
) -> tuple[str, list[Any], list[str]]:
    parser = JinjaFormat(tokenizer, tokenizer.chat_template or "").parser(conversation)
    deltas: list[Delta] = []
    sections = []
    for token_id in ids:
        deltas += parser.feed(token_id)
        sections.append(parser.section)
    deltas += parser.finish()
    content, calls = "", list[Any]()
    for delta in deltas:
        if isinstance(delta, TextDelta):
            content += delta.text if delta.section == "content" else f"[{delta.section}: {delta.text}]"
            assert delta.text
        elif delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls, sections


@pytest.mark.parametrize("text", CASES)
def test_case(tokenizer: Tokenizer, text: str) -> None:
    as_tokens = tokenizer.encode_template(text + "<|im_end|>")
    assert read(tokenizer, as_tokens)[:2] == CASES[text]
    assert read(tokenizer, tokenizer.encode(text))[:2] == CASES[text]  # the tags as ordinary text


@given(data=st.data(), text=st.sampled_from(list(CASES)))
def test_pieces_do_not_matter(tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [i for piece in pieces for i in tokenizer.encode(piece)]
    assert read(tokenizer, ids)[:2] == CASES[text]


@given(
    pieces=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", PARIS, '{"', "a", "🙂", "\n", "<|im_end|>"]
        )
    )
)
def test_any_output_is_read_without_loss(tokenizer: Tokenizer, pieces: list[str]) -> None:
    content, calls, sections = read(tokenizer, tokenizer.encode_template("".join(pieces)))
    everything = content + "".join(arguments for _, arguments in calls)
    assert everything.count("🙂") == pieces.count("🙂")
    assert set(sections) <= {"reasoning", "content", "tool_call", "control"}


BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
V3 = f'{BEGIN}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{END}'
V31 = f'{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}'
GOT = ("get_weather", '{"city": "Paris"}')
DEEPSEEK_CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    f"I look.{ALL[0]}{V3}{ALL[1]}": ("I look.", [GOT]),
    f"{ALL[0]}{V3}\n{V3}{ALL[1]}": ("", [GOT, GOT]),
    f"{ALL[0]}{V31}{V31}{ALL[1]}": ("", [GOT, GOT]),
    f"{ALL[0]}{V3[:-30]}": ("", [("get_weather", '{"city":')]),
    f"{BEGIN}function{SEP}rm\n```json\n{{}}\n```{END}": (f"{BEGIN}function{SEP}rm\n```json\n{{}}\n```{END}", []),
    f"{BEGIN}get_weather{END}": (f"{BEGIN}get_weather{END}", []),
}


@pytest.fixture(scope="module", params=["```json", ""])
def deepseek(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with DeepSeek's tags; its template tells V3 and V3.1 apart."""
    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in (BEGIN, END, SEP, *ALL)])
    directory = tmp_path_factory.mktemp("deepseek")
    library.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(f"{request.param}{{{{ messages[0].content }}}}")
    (directory / "generation_config.json").write_bytes((checkpoint / "generation_config.json").read_bytes())
    return Tokenizer(directory)


@pytest.mark.parametrize("text", DEEPSEEK_CASES)
def test_deepseek_case(deepseek: Tokenizer, text: str) -> None:
    assert read(deepseek, deepseek.encode_template(text + "<|im_end|>"))[:2] == DEEPSEEK_CASES[text]


@given(data=st.data(), text=st.sampled_from(list(DEEPSEEK_CASES)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_deepseek_pieces_do_not_matter(deepseek: Tokenizer, data: st.DataObject, text: str) -> None:
    parts = re.split("(<[^>]*>)", text)
    ids = []
    for part in parts:
        cuts = [] if part.startswith("<") else sorted(data.draw(st.sets(st.integers(0, len(part)))))
        for a, b in zip([0, *cuts], [*cuts, len(part)], strict=True):
            ids += deepseek.encode_template(part[a:b])
    assert read(deepseek, ids)[:2] == DEEPSEEK_CASES[text]


def test_deepseek_required_call(deepseek: Tokenizer) -> None:
    required = Conversation(messages=ASK.messages, tools=ASK.tools, required_tools=["get_weather"])
    chat_format = JinjaFormat(deepseek, deepseek.chat_template or "")
    grammar = chat_format.grammar(required)
    assert grammar is not None
    call = V3 if "```json" in (deepseek.chat_template or "") else V31
    other = V31 if call is V3 else V3
    assert accepts(deepseek, grammar, f"{ALL[0]}{call}{ALL[1]}<|im_end|>")
    assert not accepts(deepseek, grammar, f"{ALL[0]}{other}{ALL[1]}<|im_end|>")
    assert read(deepseek, deepseek.encode_template(f"{ALL[0]}{call}{ALL[1]}"))[:2] == ("", [GOT])


def test_deep_nesting_does_no_harm(tokenizer: Tokenizer) -> None:
    text = "<tool_call>" + "[" * 3000 + "</tool_call>"
    assert read(tokenizer, tokenizer.encode(text))[:2] == (text, [])


def test_arguments_are_streamed(tokenizer: Tokenizer) -> None:
    parser = JinjaFormat(tokenizer, tokenizer.chat_template or "").parser(ASK)
    sizes = [len(parser.feed(i)) for i in tokenizer.encode(f"<tool_call>\n{PARIS}\n</tool_call>")]
    assert sum(size > 0 for size in sizes) > 3


def test_without_tools_tags_are_text(tokenizer: Tokenizer) -> None:
    plain = Conversation(messages=ASK.messages)
    text = f"<tool_call>{PARIS}</tool_call>"
    assert read(tokenizer, tokenizer.encode_template(text), plain)[:2] == (text, [])


def test_a_call_after_reasoning(tokenizer: Tokenizer) -> None:
    text = f"<think>\nI need <tool_call>.\n</think>\n\n<tool_call>\n{PARIS}\n</tool_call>"
    content, calls, sections = read(tokenizer, tokenizer.encode_template(text))
    assert content.replace("][reasoning: ", "") == "[reasoning: I need <tool_call>.\n]"
    assert calls == [("get_weather", '{"city": "Paris"}')]
    assert sections[0] == "control"
    assert sections[1] == "reasoning"
    assert sections[-3] == "tool_call"


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    table = load_token_bytes(tokenizer.directory / "tokenizer.json")
    compiled = GrammarCompiler(table, tokenizer.vocab_size + 1).compile(grammar)
    ids = tokenizer.encode_template(text)
    return compiled.matcher.try_consume_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (f"<tool_call>\n{PARIS}\n</tool_call><|im_end|>", True),
        (f"<think>\nHm, 🙂.\n</think>\n\n<tool_call>\n{PARIS}\n</tool_call><|im_end|>", True),
        ('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>', True),
        ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call><|im_end|>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"town": 1}}\n</tool_call><|im_end|>', False),
        ("No.<|im_end|>", False),
        ("<|im_end|>", False),
    ],
)
def test_a_required_call(tokenizer: Tokenizer, text: str, accepted: bool) -> None:
    required = Conversation(messages=ASK.messages, tools=ASK.tools, required_tools=["get_weather", "time"])
    grammar = JinjaFormat(tokenizer, tokenizer.chat_template or "").grammar(required)
    assert grammar is not None
    assert accepts(tokenizer, grammar, text) == accepted
    if accepted:
        assert len(read(tokenizer, tokenizer.encode_template(text))[1]) == 1


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"city": "Paris"}<|im_end|>', True),
        ('<think>\nJSON, please.\n</think>\n\n{"city": "Paris"}<|im_end|>', True),
        ('{"city": 5}<|im_end|>', False),
        ("Paris<|im_end|>", False),
    ],
)
def test_an_answer_of_a_schema(tokenizer: Tokenizer, text: str, accepted: bool) -> None:
    assert WEATHER.parameters is not None
    response = ResponseFormat(kind="json_schema", schema=WEATHER.parameters)
    conversation = Conversation(messages=ASK.messages, response_format=response)
    chat_format = JinjaFormat(tokenizer, tokenizer.chat_template or "")
    grammar = chat_format.grammar(conversation)
    assert grammar is not None
    assert accepts(tokenizer, grammar, text) == accepted
    opened = Conversation(messages=ASK.messages, response_format=response, template_arguments={"thinking": True})
    inside = chat_format.grammar(opened)
    assert inside is not None
    assert accepts(tokenizer, inside, f"Hm.</think>\n{text}") == (accepted and "<think>" not in text)


def test_no_grammar_without_need(tokenizer: Tokenizer) -> None:
    assert JinjaFormat(tokenizer, tokenizer.chat_template or "").grammar(ASK) is None


def test_a_schema_that_can_not_be_enforced_is_refused(tokenizer: Tokenizer) -> None:
    bad = ResponseFormat(kind="json_schema", schema={"type": "nonsense"})
    with pytest.raises(FormatError):
        JinjaFormat(tokenizer, tokenizer.chat_template or "").grammar(
            Conversation(messages=ASK.messages, response_format=bad)
        )


def test_arguments_are_json(tokenizer: Tokenizer) -> None:
    for _, calls in CASES.values():
        for _, arguments in calls:
            if arguments != '{"ci':
                json.loads(arguments)
