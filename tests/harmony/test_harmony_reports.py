"""Published bug reports against servers of gpt-oss that concern the parser: minimal input and right outcome.

Numbered as in the project's collection; 18, 33 and 38 name reports of vLLM, mlx-openai-server and LM Studio.
"""

import pytest
from harmony_replies import TOOLS, Reply, parse, parse_ids

from rose_dist.frontend.formats.base import Conversation, Message, ResponseFormat, TextDelta, Tool, ToolCallDelta
from rose_dist.frontend.formats.harmony_parser import HarmonyParser

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
R, L, K = "<|return|>", "<|call|>", "<|constrain|>"


def _call(header: str, arguments: str = "{}") -> str:
    return f"{C}{header}{M}{arguments}{L}"


# number, reply, reasoning, content, calls
REPORTS = [
    (1, _call(f"commentary I will to=functions.web-browsing {K}json"), "", "", [("web-browsing", "{}")]),
    (2, f"{C}final{M}yo{R}.", "", "yo", []),
    (2, f"{C}analysis{M}hi{E}{E}{S}assistant{C}final{M}yo{R}", "hi", "yo", []),
    (3, f"{C}analysis{M}thinking about", "thinking about", "", []),
    (4, f"{C}analysis We think{E}{S}assistant{C}final{M}yo{R}", "We think", "yo", []),
    (6, _call("commentary to=functions.f <|constrain|>json"), "", "", [("f", "{}")]),
    (10, _call(f"commentary to=create_event{C}analysis"), "", "", [("create_event", "{}")]),
    (11, _call(f"commentary to=functions.f {K}json", '{"a": tru'), "", "", [("f", '{"a": tru')]),
    (12, _call(f"commentary to=grep {K}json"), "", "", [("grep", "{}")]),
    (13, _call("commentary to=shelljson"), "", "", [("shell", "{}")]),
    (13, _call("commentary to=functions.shelljson"), "", "", [("shell", "{}")]),
    (13, f" to=functions.f{C}commentary{M}{{\u00a0\u2003}}{L}", "", "", [("f", "{\u00a0\u2003}")]),
    (14, f"{C}commentary 2?{M}x{E}", "", "x", []),
    (14, f"{C}analysis??{M}x{E}{S}assistant{C}final{M}yo{R}", "x", "yo", []),
    (14, f"{C}??{M}x{E}{S}assistant{C}final{M}yo{R}", "x", "yo", []),
    (15, f"{C}analysis{M}only this{E}", "only this", "", []),
    (17, _call("analysis to=functions.grep code", '{"q":1}'), "", "", [("grep", '{"q":1}')]),
    (19, f"{C}final{M}yo{R} and on{R} and on", "", "yo", []),
    (19, f"{C}final{M}yo{R}{S}assistant{C}final{M}again{R}", "", "yo\nagain", []),
    (24, f"{C}commentary{M}Plan: look it up.{E}{S}assistant{C}final{M}yo{R}", "", "Plan: look it up.\nyo", []),
    (24, _call("analysis to=browser.search code", '{"query":"x"}'), '{"query":"x"}', "", []),
    (25, f"{C}analysis{M}a{E}{S}assistant{C}analysis{M}b{E}{S}assistant{C}final{M}c{R}", "a\nb", "c", []),
    (34, f"{S}bash{C}final{M}yo{R}", "", "yo", []),
    (35, f"{C}final{M}a{K}b{M}c<|startoftext|>d{R}", "", "abcd", []),
    (36, _call("commentary to=functions.f") + S + "assistant" + _call("commentary to=grep", "[]"), "", "",
     [("f", "{}"), ("grep", "[]")]),
    (38, f'{C}commentary to=functions.f {K}json{M}{{"path": "/tm', "", "", [("f", '{"path": "/tm')]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [pytest.param(text, rest, id=str(n)) for n, text, *rest in REPORTS])
def test_report(vocabulary, text, expected):
    reply = parse(text, vocabulary)
    assert [reply.reasoning, reply.content, reply.calls] == expected


def test_18_several_tokens_a_step_lose_nothing(vocabulary):
    """A step of many tokens is as many feeds; what matters is that none of them is lost."""
    text = f'{C}analysis{M}thinking{E}{S}assistant{C}commentary to=functions.f {K}json{M}{{"city": "東京"}}{L}'
    reply = parse(text, vocabulary)
    assert (reply.reasoning, reply.calls) == ("thinking", [("f", '{"city": "東京"}')])


def test_23_name_comes_first_and_once(vocabulary):
    parser = HarmonyParser(vocabulary, TOOLS)
    ids = vocabulary.encode_with_control(f'{C}commentary to=functions.f {K}json{M}{{"a": 1}}{L}')
    deltas = [delta for token_id in ids for delta in parser.feed(token_id)]
    assert deltas[0] == ToolCallDelta(0, "", "f")
    assert all(delta.name is None and delta.index == 0 for delta in deltas[1:])


def test_29_and_30_every_token_has_its_section(vocabulary):
    """Usage and log probabilities are counted by section."""
    text = f"{C}analysis{M}one two{E}{S}assistant{C}final{M}three four five{R}"
    parser = HarmonyParser(vocabulary, TOOLS)
    sections = []
    for token_id in vocabulary.encode_with_control(text):
        parser.feed(token_id)
        sections.append(parser.section)
    assert sections == ["control"] * 3 + ["reasoning"] * 2 + ["control"] * 6 + ["content"] * 3 + ["control"]


def test_33_stop_ids_end_calls_and_answers_but_not_reasoning(harmony):
    assert harmony.stop_ids == {200002, 200012}


def test_preamble_is_reasoning_where_content_must_fit_a_format(harmony):
    conversation = Conversation(
        messages=[Message(role="user", content="hi")],
        tools=[Tool(name="f")],
        response_format=ResponseFormat(kind="json_object"),
    )
    parser = harmony.parser(conversation)
    text = f"{C}commentary{M}I will look.{E}{S}assistant{C}final{M}{{}}{R}"
    deltas = [delta for i in harmony.vocabulary.encode_with_control(text) for delta in parser.feed(i)]
    reply = Reply.of([*deltas, *parser.finish()], parser.messages)
    assert (reply.reasoning, reply.content) == ("I will look.", "{}")


@pytest.mark.parametrize("character", ["é", "東", "🙂", "👩‍👩‍👧‍👦", "\ufdfd"])
def test_incomplete_utf8_is_held_back(vocabulary, character):
    parser = HarmonyParser(vocabulary, TOOLS)
    for token_id in vocabulary.encode_with_control(f"{C}final{M}"):
        parser.feed(token_id)
    single_bytes = [vocabulary.token_bytes.index(bytes([byte])) for byte in character.encode()]
    texts = ["".join(d.text for d in parser.feed(i) if isinstance(d, TextDelta)) for i in single_bytes]
    assert "".join(texts) == character
    assert "\ufffd" not in character
    assert parser.finish() == ()


def test_character_cut_by_the_end_is_a_replacement_character(vocabulary):
    half = [vocabulary.token_bytes.index(bytes([byte])) for byte in "東".encode()[:2]]
    ids = [*vocabulary.encode_with_control(f"{C}final{M}yo"), *half]
    assert parse_ids(ids, vocabulary).content == "yo\ufffd"
    assert parse_ids([*ids, *vocabulary.encode_with_control(f"{E}{S}assistant{C}final{M}x")], vocabulary).content == (
        "yo\ufffd\nx"
    )


def test_ids_outside_the_vocabulary_are_ignored(vocabulary):
    ids = vocabulary.encode_with_control(f"{C}final{M}yo{R}")
    foreign = [-1, 201_088, 10**12, 200_000, 200_018, 199_998]
    mixed = [token_id for pair in zip(ids, foreign, strict=False) for token_id in pair] + ids[len(foreign) :]
    assert parse_ids(mixed, vocabulary).content == "yo"
