"""Required calls and response formats on Harmony: which ids the engine lets through, and what they parse to."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from harmony_replies import Reply

from rose_dist.engine.grammar import GrammarCompiler, GrammarError, TokenGrammar
from rose_dist.frontend.formats.base import Conversation, FormatError, ResponseFormat, Tool
from rose_dist.frontend.formats.harmony_vocabulary import CONTROL_TEXT, SIZE

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
R, L, K = "<|return|>", "<|call|>", "<|constrain|>"

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool(name="get_weather", parameters=SCHEMA), Tool(name="ping")]
THINK = f"{C}analysis{M}Let me see: {{\n東京 🙂{E}{S}assistant"
PLAN = f"{C}commentary{M}I will look.{E}{S}assistant"
GOOD = '{"city": "東京", "days": 3}'


@pytest.fixture(scope="module")
def compiler(vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary.token_bytes, SIZE)


def allowed_ids(compiler: GrammarCompiler, grammar: TokenGrammar) -> np.ndarray:
    masks = compiler.empty_masks(1)
    compiler.fill_masks([(grammar, 0)], masks)
    return np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")[:SIZE])


def first_refused(harmony, compiler, conversation: Conversation, text: str) -> str | None:
    """Text from the first token on that the masks don't allow; None if all are allowed."""
    grammar = compiler.compile(harmony.grammar(conversation))
    ids = harmony.vocabulary.encode_with_control(text)
    for position, token_id in enumerate(ids):
        if token_id not in allowed_ids(compiler, grammar):
            return harmony.vocabulary.decode(ids[position:])
        grammar.accept(token_id)
    assert grammar.finished
    return None


def required(*names: str) -> Conversation:
    return Conversation(messages=[], tools=TOOLS, required_tools=list(names))


def formatted(kind: str, **fields: object) -> Conversation:
    return Conversation(messages=[], tools=TOOLS, response_format=ResponseFormat(kind=kind, **fields))


STRICT = [Tool(name="get_weather", parameters=SCHEMA, strict=True), Tool(name="ping")]


def strict(**fields: object) -> Conversation:
    return Conversation(messages=[], tools=STRICT, **fields)


def call(name: str, arguments: str) -> str:
    return f"{C}commentary to=functions.{name} {K}json{M}{arguments}{L}"


ANSWER = f"{C}final{M}{GOOD}{R}"


@pytest.mark.parametrize("before", ["", THINK, PLAN, THINK + PLAN, THINK + THINK])
@pytest.mark.parametrize(
    ("conversation", "end"),
    [
        (required("get_weather"), call("get_weather", GOOD)),
        (required("get_weather", "ping"), call("ping", "{}")),
        (required("get_weather", "ping"), call("get_weather", GOOD)),
        (formatted("json_schema", schema=SCHEMA), ANSWER),
        (formatted("json_schema", schema=SCHEMA), call("ping", "anything")),
        (formatted("json_object"), f'{C}final{M}{{"x": [1, null]}}{R}'),
        (formatted("regex", text="[a-z]+/[0-9]{2}"), f"{C}final{M}abc/42{R}"),
        (formatted("lark", text='start: "yes" | "no"'), f"{C}final{M}no{R}"),
        (strict(), call("get_weather", GOOD)),
        (strict(), call("ping", "anything")),
        (strict(), f"{C}final{M}In Tokyo: {{\nfree text 🙂{R}"),
        (strict(), f"{C}final{M}{R}"),
        (strict(response_format=ResponseFormat(kind="json_object")), call("get_weather", GOOD)),
        (strict(template_arguments={"builtin_tools": ["browser"]}), f"{C}analysis to=browser.search code{M}{{x{L}"),
        (strict(template_arguments={"builtin_tools": ["python"]}), f"{C}analysis to=python{M}print(1){L}"),
    ],
)
def test_canonical_turns_are_allowed(harmony, compiler, conversation, end, before):
    assert first_refused(harmony, compiler, conversation, before + end) is None


@pytest.mark.parametrize(
    ("conversation", "text", "refused"),
    [
        (required("get_weather"), ANSWER, f"final{M}{GOOD}{R}"),
        (required("get_weather"), f"{C}analysis{M}x{R}", R),
        (required("get_weather"), f"{THINK}{C}final", "final"),
        (required("ping"), call("get_weather", GOOD), f'get_weather {K}json{M}{GOOD}{L}'),
        (required("get_weather"), call("get_weather", '{"days": 1}'), f"}}{L}"),
        (required("get_weather"), call("get_weather", '{"city": "much too long"}'), None),
        (required("get_weather"), call("get_weather", GOOD).replace(L, R), R),
        (required("get_weather"), f"{C}commentary to=functions.get_weather{M}", M),
        (formatted("json_schema", schema=SCHEMA), f"{C}final{M}yes{R}", f"yes{R}"),
        (formatted("json_schema", schema=SCHEMA), f"{C}final{M}{R}", R),
        (formatted("json_schema", schema=SCHEMA), f"{C}final{M}{GOOD[:-1]}{R}", R),
        (formatted("json_schema", schema=SCHEMA), ANSWER.replace(R, E), E),
        (formatted("json_schema", schema=SCHEMA), f"{M}{GOOD}{R}", f"{M}{GOOD}{R}"),
        (formatted("regex", text="[a-z]+/[0-9]{2}"), f"{C}final{M}abc/4{R}", R),
        (strict(), call("get_weather", '{"days": 1}'), f"}}{L}"),
        (strict(), call("get_weather", GOOD[:-1]), L),
        (strict(), call("get_weather", GOOD).replace(L, R), R),
        (strict(), call("other", "{}"), f"other {K}json{M}{{}}{L}"),
        (strict(), f"{C}final{M}yes{L}", L),
        (strict(), f"{C}analysis to=python code{M}1{L}", f"to=python code{M}1{L}"),
        (strict(response_format=ResponseFormat(kind="json_object")), call("get_weather", '{"days": 1}'), f"}}{L}"),
    ],
)  # fmt: skip
def test_other_turns_are_refused(harmony, compiler, conversation, text, refused):
    rest = first_refused(harmony, compiler, conversation, text)
    assert rest is not None
    assert refused is None or rest.replace(" ", "").endswith(refused.replace(" ", ""))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("conversation", [required("get_weather", "ping"), formatted("json_schema", schema=SCHEMA)])
def test_random_choices_give_a_turn_that_parses(harmony, compiler, conversation, seed):
    """Half of the choices are among what closes: random ones of 200,000 ids would write for ever."""
    rng = np.random.default_rng(seed)
    grammar = compiler.compile(harmony.grammar(conversation))
    closing = np.array([*CONTROL_TEXT, *harmony.vocabulary.encode('"'), *harmony.vocabulary.encode("}")])
    parser = harmony.parser(conversation)
    deltas = []
    while not grammar.finished:
        allowed = allowed_ids(compiler, grammar)
        preferred = closing[np.isin(closing, allowed, kind="table")]
        token_id = int(rng.choice(preferred if len(preferred) and rng.random() < 0.5 else allowed))
        grammar.accept(token_id)
        deltas += parser.feed(token_id)
    reply = Reply.of([*deltas, *parser.finish()], parser.messages)
    if reply.calls:
        ((name, arguments),) = reply.calls
        if name == "get_weather" and conversation.required_tools:
            jsonschema.validate(json.loads(arguments), SCHEMA)
    else:
        assert not conversation.required_tools
        jsonschema.validate(json.loads(reply.content), SCHEMA)


def test_a_strict_tool_alone_is_held_to_its_schema(harmony):
    grammar = json.loads(harmony.grammar(strict()))
    assert [part.get("json_schema", {}).get("required") for part in grammar["grammars"][1:]] == [["city"]]


def test_no_grammar_without_a_reason(harmony):
    assert harmony.grammar(Conversation(messages=[], tools=TOOLS)) is None


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (required("unknown"), "tool_choice names 'unknown'"),
        (
            formatted("json_schema", schema={"type": "object", "not": {"type": "string"}}),
            "json_schema can't be enforced",
        ),
        (formatted("json_schema", schema={"type": "strin"}), "json_schema can't be enforced"),
        (formatted("json_schema", schema={"minimum": "a" * 88 + "é" * 20}), "json_schema can't be enforced"),
        (formatted("lark", text="start: <[200012]>"), "lark can't be enforced"),
        (
            Conversation(messages=[], tools=[Tool(name="g", parameters={"not": {}}, strict=True)]),
            "parameters of tool g can't be enforced",
        ),
        (formatted("regex", text="[a"), "regex can't be enforced.*regex parse error"),
        (formatted("lark", text="begin: /a/"), "lark can't be enforced"),
        (
            Conversation(messages=[], tools=[Tool(name="f", parameters={"type": 3})], required_tools=["f"]),
            "parameters of tool f can't be enforced",
        ),
    ],
)
def test_what_can_not_be_enforced_is_refused(harmony, conversation, message):
    with pytest.raises(FormatError, match=message):
        harmony.grammar(conversation)


class TestEngineSide:
    def test_rows_of_other_requests_are_left_alone(self, harmony, compiler):
        grammars = [compiler.compile(harmony.grammar(required(name))) for name in ("ping", "get_weather")]
        masks = compiler.empty_masks(4)
        assert masks.shape == (4, SIZE // 32)
        compiler.fill_masks([(grammars[0], 2), (grammars[1], 0)], masks)
        assert (masks[[1, 3]] == -1).all()
        assert [np.bitwise_count(masks[row].view(np.uint32)).sum() for row in (0, 2)] == [1, 1]

    def test_several_threads_give_the_same_masks(self, harmony, vocabulary, compiler):
        parallel = GrammarCompiler(vocabulary.token_bytes, SIZE, threads=2)
        text = harmony.grammar(formatted("json_schema", schema=SCHEMA))
        ids = vocabulary.encode_with_control(ANSWER)
        masks = parallel.empty_masks(4)
        grammars = [parallel.compile(text) for _ in range(4)]
        single = compiler.compile(text)
        for token_id in ids:
            parallel.fill_masks([(grammar, row) for row, grammar in enumerate(grammars)], masks)
            expected = compiler.empty_masks(1)
            compiler.fill_masks([(single, 0)], expected)
            assert (masks == expected).all()
            for grammar in [*grammars, single]:
                grammar.accept(token_id)

    def test_a_token_outside_the_grammar_is_an_error(self, harmony, compiler):
        grammar = compiler.compile(harmony.grammar(required("ping")))
        with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
            grammar.accept(0)
        with pytest.raises(GrammarError):
            compiler.fill_masks([(grammar, 0)], compiler.empty_masks(1))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{}", "no_forcing"),
            ('{"no_forcing": 1}', "."),
            ('{"grammars": [{"lark_grammar": "%llguidance {\\"no_forcing\\": true}\\nstart: missing"}]}', "missing"),
        ],
    )
    def test_invalid_grammars(self, compiler, text, message):
        with pytest.raises(GrammarError, match=message):
            compiler.compile(text)

    def test_nothing_follows_a_finished_grammar(self, harmony, compiler):
        grammar = compiler.compile(harmony.grammar(required("ping")))
        for token_id in harmony.vocabulary.encode_with_control(call("ping", "{}")):
            assert not grammar.finished
            grammar.accept(token_id)
        assert grammar.finished
        assert set(allowed_ids(compiler, grammar)).isdisjoint({*CONTROL_TEXT, *range(199_998)})
