"""Every header form and fault that openai-harmony's parser was measured on, with the right outcome for a client.

The numbers are those of the measurement: what the library makes of the same input (a wrong recipient for 7 to 15 and
35, an exception for 16 to 26 and 32) is what a server must not pass on.
"""

import pytest
from harmony_replies import BUILTIN_TOOLS, TOOLS, parse

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
R, L, K = "<|return|>", "<|call|>", "<|constrain|>"
WEATHER = [("get_weather", "{}")]
F = [("f", "{}")]

# number, what follows the generation prompt, reasoning, content, calls
ROWS = [
    (1, f"{C}analysis{M}hi{E}{S}assistant{C}final{M}yo{R}", "hi", "yo", []),
    (2, f"{C}commentary to=functions.get_weather {K}json{M}{{}}{L}", "", "", WEATHER),
    (3, f" to=functions.get_weather{C}commentary {K}json{M}{{}}{L}", "", "", WEATHER),
    (4, f"{C}commentary to=functions.get_weather{K}json{M}{{}}{L}", "", "", WEATHER),
    (5, f"{C}commentary to=functions.get_weather json{M}{{}}{L}", "", "", WEATHER),
    (6, f"{C}analysis to=functions.get_weather code{M}{{}}{L}", "", "", WEATHER),
    (7, f"{C}commentary to=functions.get_weather{C}commentary {K}json{M}{{}}{L}", "", "", WEATHER),
    (8, f"{C}analysis to=functions.get_weather{C}commentary {K}json{M}{{}}{L}", "", "", WEATHER),
    (9, f"{C}analysis{C}final{M}yo{R}", "", "yo", []),
    (10, f"{C}commentary to=functions.f––commentary{M}{{}}{L}", "", "", F),
    (11, f"{C}commentary?{M}x{E}", "", "x", []),
    (12, f"{C}final {K}json{M}{{}}{R}", "", "{}", []),
    (13, f"{C}final{K}json{M}{{}}{R}", "", "{}", []),
    (14, f"{C}final {K}response{M}x{R}", "", "x", []),
    (15, f"{C}final to=user{M}x{R}", "", "x", []),
    (16, f"{C}We need to answer{M}x{E}", "x", "", []),
    (17, f"{C}{M}x{E}", "", "x", []),
    (18, f"{C}commentary to=functions.f {K}json{K}json{M}{{}}{L}", "", "", F),
    (19, f"{C}commentary junk to=functions.web-browsing json{M}{{}}{L}", "", "", [("web-browsing", "{}")]),
    (20, f"{C}commentary to= functions.f json{M}{{}}{L}", "", "", F),
    (21, f"{C}commentary to=functions.f json code{M}{{}}{L}", "", "", F),
    (22, f"{C}analysis{M}hi{E}assistant{C}final{M}yo{R}", "hi", "yo", []),
    (23, f"{C}commentary to=functions.f{M}{{}}{L}commentary{M}x", "", "x", F),
    (24, f"{C}final{M}yo{R}{R}", "", "yo", []),
    (25, f"{C}final{M}yo{R}We", "", "yo", []),
    (26, f"{C}analysis{M}hi{E}{S}bash{C}final{M}yo{R}", "hi", "yo", []),
    (27, f"{C}analysis We think{E}{S}assistant{C}final{M}yo{R}", "We think", "yo", []),
    (28, f"{C}analysis{M}hi{S}assistant{C}final{M}yo{R}", "hi", "yo", []),
    (29, f"{C}analysis{M}hi{C}final{M}yo{R}", "hi", "yo", []),
    (30, f"{C}final{M}yo<|endoftext|>", "", "yo", []),
    (30, f"{C}final{M}yo<|endoftext|>Once upon", "", "yo", []),
    (31, f"{M}hello{R}", "", "hello", []),
    (32, "", "", "", []),
    (32, f"{C}", "", "", []),
    (32, f"{C}analysis", "", "", []),
    (32, f"{C}commentary to=functions.f", "", "", []),
    (33, f"{C}final{M}partial tex", "", "partial tex", []),
    (33, f'{C}commentary to=functions.f {K}json{M}{{"a": 1', "", "", [("f", '{"a": 1')]),
    (34, f"{C}analysis\n{M}x", "x", "", []),
    (35, f"{C}commentary to=assistant{C}commentary?{M}x{E}", "", "x", []),
    (36, f"{C}commentary to=get_weather{M}{{}}{L}", "", "", WEATHER),
    (36, f"{C}commentary to=functions{M}{{}}{L}", "{}", "", []),
    (36, f"{C}analysis to=python code{M}1+1{L}", "1+1", "", []),
    (36, f"{C}commentary to=repo_browser.open_file code{M}{{}}{L}", "{}", "", []),
]


@pytest.mark.parametrize(("text", "expected"), [pytest.param(text, rest, id=str(n)) for n, text, *rest in ROWS])
def test_measured_form(vocabulary, text, expected):
    reply = parse(text, vocabulary)
    assert [reply.reasoning, reply.content, reply.calls] == expected
    for message in reply.messages:
        assert "<|" not in f"{message.role}{message.channel}{message.recipient}{message.content_type}{message.content}"


@pytest.mark.parametrize(
    ("text", "channel", "recipient", "content_type"),
    [
        (ROWS[1][1], "commentary", "functions.get_weather", "json"),
        (ROWS[2][1], "commentary", "functions.get_weather", "json"),
        (ROWS[3][1], "commentary", "functions.get_weather", "json"),
        (ROWS[4][1], "commentary", "functions.get_weather", "json"),
        (ROWS[5][1], "analysis", "functions.get_weather", "code"),
        (ROWS[6][1], "commentary", "functions.get_weather", "json"),
        (f"{C}final {K}json{M}{{}}{R}", "final", None, "json"),
        (f"{C}final {K}response{M}x{R}", "final", None, "response"),
        (f"{C}final to=user{M}x{R}", "final", "user", None),
        (f"{C}commentary to=get_weather{M}{{}}{L}", "commentary", "functions.get_weather", None),
        (f"{C}commentary to=get_weather", "commentary", "functions.get_weather", None),
        (f"{M}hello{R}", None, None, None),
    ],
)
def test_parsed_message(vocabulary, text, channel, recipient, content_type):
    (message,) = parse(text, vocabulary).messages
    assert message.role == "assistant"
    assert (message.channel, message.recipient, message.content_type) == (channel, recipient, content_type)


def test_missing_start_gives_two_messages(vocabulary):
    """The library keeps the first message and raises for the second."""
    messages = parse(f"{C}analysis{M}hi{E}assistant{C}final{M}yo{R}", vocabulary).messages
    assert [(message.channel, message.content) for message in messages] == [("analysis", "hi"), ("final", "yo")]


@pytest.mark.parametrize("name", ["browser.search", "browser.open", "python"])
def test_builtin_tool_is_a_call_where_it_is_offered(vocabulary, name):
    text = f"{C}analysis to={name} code{M}1+1{L}"
    assert parse(text, vocabulary, BUILTIN_TOOLS).calls == [(name, "1+1")]
    assert parse(text, vocabulary, TOOLS).calls == []


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "functions.f to=assistant", "f", "user:bob"])
def test_text_of_another_role_is_not_shown(vocabulary, role):
    for start in (S, ""):
        reply = parse(f"{C}final{M}yo{E}{start}{role}{C}commentary{M}made up{E}", vocabulary)
        assert (reply.reasoning, reply.content, reply.calls) == ("", "yo", [])
        assert reply.messages[1].role != "assistant"


@pytest.mark.parametrize(
    "text",
    [
        f"{C}commentary to=functions.f to=assistant{M}{{}}{L}",
        f" to=functions.f{C}commentary to=nobody{M}{{}}{L}",
        f" to=nobody{C}commentary to=functions.f{M}{{}}{L}",
        f"{C}analysis{M}{E}{S}assistant to=functions.f{C}commentary {K}json{M}{{}}{L}",
        f"{C}analysis{M}{E}assistant to=functions.f{C}commentary {K}json{M}{{}}{L}",
    ],
)
def test_recipient_that_is_offered_wins_wherever_it_stands(vocabulary, text):
    assert parse(text, vocabulary).calls == F


@pytest.mark.parametrize(
    ("header", "leftover"),
    [("json", ""), (" json", ""), ('json{"a":1}', '{"a":1}'), ('json {"a":1}', '{"a":1}')],
)
def test_call_without_message_marker_keeps_its_arguments(vocabulary, header, leftover):
    assert parse(f"{C}commentary to=functions.f {K}{header}{L}", vocabulary).calls == [("f", leftover)]
