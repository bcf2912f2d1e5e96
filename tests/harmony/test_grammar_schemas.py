"""Schema-constrained sampling with random logits: every output parses and validates.

`ROSE_GRAMMAR_SCHEMAS` sets how many schemas are tried (default 500, about 6 s).
"""

import json
import os
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rose_dist.engine.grammar import GrammarCompiler
from rose_dist.frontend.formats.base import FormatError, ResponseFormat
from rose_dist.frontend.grammar import compose, response_part, token

COUNT = int(os.environ.get("ROSE_GRAMMAR_SCHEMAS", "500"))
PIECES = ['{"', '":', '":', '"', '",', '",', '"', "},", "}]", "[[", '"}', "true", "false", "null", "123", "name", "é"]
STOP = 256 + len(PIECES)
VOCAB_SIZE = STOP + 5
LONG = 60
"""Tokens after which the sampler prefers to close what is open."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler([*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)], VOCAB_SIZE)


def sample(compiler: GrammarCompiler, grammar: str, rng: np.random.Generator) -> str:
    matcher = compiler.compile(grammar)
    masks = compiler.empty_masks(1)
    closers = [*b'"]}', STOP, PIECES.index('"}') + 256, PIECES.index("}]") + 256]
    ids: list[int] = []
    while not ids or ids[-1] != STOP:
        assert len(ids) < 3000, "the sampler found no end"
        compiler.fill_masks([(matcher, 0)], masks)
        allowed = np.unpackbits(masks[0].view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)
        logits = rng.standard_normal(VOCAB_SIZE) * 3
        if len(ids) > LONG:
            logits[[ord('"'), STOP] if allowed[ord("q")] else closers] += 12
        ids.append(int(np.argmax(np.where(allowed, logits, -np.inf))))
        matcher.accept(ids[-1])
    assert matcher.finished
    tokens = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
    return b"".join(tokens[token_id] for token_id in ids[:-1]).decode()


def _of(kind: str, fixed: dict | None = None, /, **optional: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **(fixed or {})}, optional=optional)


small = st.integers(0, 3)
words = st.sampled_from(["a", "name", "é", 'quo"te', "", "x y", "\\", "日本", "null"])
values = words | st.integers(-5, 5) | st.none() | st.booleans() | st.sampled_from([1.5, [1, "a"], {"k": None}])
leaves = st.one_of(
    _of("string", minLength=small, maxLength=st.integers(3, 9)),
    _of("string", {"pattern": st.sampled_from(["^[a-c]+$", "^\\d{3}-x$", "^(ab|c)*$", "b", "^日.$", "^[^a-z]{2}"])}),
    _of("string", {"format": st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"])}),
    _of("integer", minimum=st.integers(-9, 5), maximum=st.sampled_from([5, 17, 1000])),
    _of("integer", {"multipleOf": st.integers(1, 12)}),
    _of("number", exclusiveMinimum=st.sampled_from([0, -1.5]), maximum=st.sampled_from([2, 7.25])),
    _of("boolean"),
    _of("null"),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(["string", "null", "integer"]), min_size=1, unique=True)}),
)


def _composite(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "key", "with space", 'quo"te', "é"])
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _of(
            "object",
            {"properties": st.dictionaries(names, inner, max_size=4), "additionalProperties": st.just(False) | inner},
            required=st.lists(names, max_size=3, unique=True),
        ),
        _of("object", properties=st.dictionaries(names, inner, max_size=3)),
        _of("array", {"items": inner}, minItems=small, maxItems=st.integers(3, 5)),
        _of("array", {"prefixItems": several, "items": st.just(False), "minItems": st.just(1)}),
        st.fixed_dictionaries({"anyOf": several}),
    )


trees = st.recursive(leaves, _composite, max_leaves=8)
schemas = trees | trees.map(lambda schema: {"$ref": "#/$defs/Inner", "$defs": {"Inner": schema}})


def test_every_output_validates(compiler):
    rng = np.random.default_rng(7)
    tried, refused = [], []

    @settings(
        max_examples=COUNT,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas)
    def check(schema):
        try:
            part = response_part("answer", ResponseFormat(kind="json_schema", schema=schema))
        except FormatError:
            refused.append(schema)
            return
        text = sample(compiler, compose(f"start: @answer {token(STOP)}", [part]), rng)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        tried.append(schema)

    check()
    print(f"{len(tried)} schemas sampled, {len(refused)} refused")
    assert len(tried) > 0.8 * COUNT


RECURSIVE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
DISCRIMINATED_UNION = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {"Cat": CAT, "Dog": DOG},
}


@pytest.mark.parametrize(
    "response_format",
    [
        ResponseFormat(kind="json_object"),
        ResponseFormat(kind="json_schema", schema=RECURSIVE),
        ResponseFormat(kind="json_schema", schema=DISCRIMINATED_UNION),
        ResponseFormat(kind="json_schema", schema={"$ref": "#/$defs/A", "$defs": {"A": {"enum": [1, "b"]}}}),
    ],
)
def test_schema_kinds(compiler, response_format):
    grammar = compose(f"start: @answer {token(STOP)}", [response_part("answer", response_format)])
    for seed in range(10):
        value = json.loads(sample(compiler, grammar, np.random.default_rng(seed)))
        jsonschema.validate(value, response_format.schema or {"type": "object"})
