"""JSON schema to the TypeScript in which gpt-oss was taught its tools.

The layout is openai-harmony's; types that it renders as `any` or with the wrong precedence are rendered in full. Every
free text ends up in a `//` comment, line by line, or in a JSON string, so that no text can leave its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from rose_dist.frontend.formats.base import FormatError

Schema = dict[str, Any]

_PRIMITIVES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*")
_MOST_CHARACTERS = 1_000_000
_DEEPEST = 64


def comment_lines(text: str, indent: str = "") -> list[str]:
    """`text` as `//` lines; every line break that Unicode knows starts a new one."""
    return [f"{indent}// {line}" for line in text.splitlines()]


def parameters_to_typescript(schema: Schema) -> str:
    """The type of a function's argument object, e.g. `{\\nx: number,\\n}`.

    Raises:
        FormatError: its text, and that of every type inside it, comes to more than 1,000,000 characters, as references
            to large definitions or to further references can make it.
    """
    return _Converter(schema).described(schema, "", 0)


class _Converter:
    """One conversion: the root that `$ref` points into, and how much may still be written."""

    def __init__(self, root: Schema):
        self._root = root
        self._left = _MOST_CHARACTERS
        self._open_references: list[str] = []
        """Being expanded now; meeting one again is a recursive type, which has no finite expansion."""

    def described(self, schema: Any, indent: str, depth: int) -> str:
        return self._with_description(schema, self._type(schema, indent, depth), indent)

    def _with_description(self, schema: Any, text: str, indent: str) -> str:
        """An object that is no property's value carries its own description, in front of the brace."""
        description = _dict(self._resolve(schema)).get("description")
        if text.startswith("{\n") and isinstance(description, str):
            return "\n".join([*comment_lines(description, indent), text])
        return text

    def _type(self, schema: Any, indent: str, depth: int) -> str:
        return " | ".join(self._union(schema, indent, depth))

    def _union(self, schema: Any, indent: str, depth: int) -> list[str]:
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference in self._open_references:
            return ["any"]
        schema = self._resolve(schema)
        if schema is False:
            return ["never"]
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return ["any"]
        self._open_references.append(reference or "")
        alternatives = list(dict.fromkeys(self._alternatives(schema, indent, depth + 1)))
        self._open_references.pop()
        if schema.get("nullable") is True and not {"null", "any"} & set(alternatives):
            alternatives.append("null")
        self._spend(alternatives)
        return alternatives

    def _spend(self, texts: list[str]) -> None:
        self._left -= sum(map(len, texts))
        if self._left < 0:
            raise FormatError("its JSON schema is too large with all references written out; use fewer references")

    def _alternatives(self, schema: Schema, indent: str, depth: int) -> Iterator[str]:
        kind = schema.get("type")
        if "const" in schema:
            yield _literal(schema["const"])
        elif values := _list(schema.get("enum")):
            yield from map(_literal, values)
        elif variants := _variants(schema):
            for variant in variants:
                yield self._type(variant, indent, depth)
        elif _list(schema.get("allOf")):
            yield self._all_of(schema, indent, depth)
        elif _list(kind):
            for one in _list(kind):
                yield self._one_kind(one, schema, indent, depth)
        else:
            yield self._one_kind(kind or _implied_kind(schema), schema, indent, depth)

    def _one_kind(self, kind: Any, schema: Schema, indent: str, depth: int) -> str:
        if kind == "object":
            return self._object(schema, indent, depth)
        if kind == "array":
            return self._array(schema, indent, depth)
        return _PRIMITIVES.get(kind, "any") if isinstance(kind, str) else "any"

    def _array(self, schema: Schema, indent: str, depth: int) -> str:
        items = schema.get("items")
        positions = schema.get("prefixItems", items if isinstance(items, list) else None)
        if isinstance(positions, list) and positions:
            return f"[{', '.join(self._type(item, indent, depth) for item in positions)}]"
        if items is None or isinstance(items, list):
            return "Array<any>"
        alternatives = self._union(items, indent, depth)
        if len(alternatives) > 1:
            return f"({' | '.join(alternatives)})[]"
        return f"{self._with_description(items, alternatives[0], indent)}[]"

    def _object(self, schema: Schema, indent: str, depth: int) -> str:
        properties = _dict(schema.get("properties"))
        others = schema.get("additionalProperties")
        if not properties:
            if others is False:
                return "{}"
            return f"{{ [key: string]: {self._type(others, indent, depth)} }}" if isinstance(others, dict) else "object"
        required = _list(schema.get("required"))
        lines = ["{"]
        for name, value in properties.items():
            lines += self._property(name, value, name in required, indent, depth)
        if isinstance(others, dict) and others:
            lines.append(f"{indent}[key: string]: {self._type(others, f'{indent}    ', depth)},")
        return "\n".join([*lines, f"{indent}}}"])

    def _property(self, name: str, value: Any, required: bool, indent: str, depth: int) -> list[str]:
        schema = _dict(self._resolve(value))
        lines = _leading_comments(schema, indent)
        self._spend(lines)
        label = f"{name if _IDENTIFIER.fullmatch(name) else _literal(name)}{'' if required else '?'}"
        variants = _variants(schema)
        if not any(_trailing_comment(self._resolve(variant)) for variant in variants):
            comment = _trailing_comment({key: schema[key] for key in ("default", "enum") if key in schema})
            return [*lines, f"{indent}{label}: {self._type(value, f'{indent}    ', depth)},{comment}"]
        if "default" in schema:
            lines.append(f"{indent}// {_default(schema)}")
        lines.append(f"{indent}{label}:")
        for variant in variants:
            text = self._type(variant, f"{indent}   ", depth)
            lines.append(f"{indent} | {text}{_trailing_comment(self._resolve(variant))}")
        return [*lines, f"{indent},"]

    def _all_of(self, schema: Schema, indent: str, depth: int) -> str:
        """Objects are merged into one; anything else is an intersection."""
        parts = [self._resolve(part) for part in schema["allOf"]]
        parts.append({key: schema[key] for key in ("properties", "required") if key in schema})
        objects = [part for part in map(_dict, parts) if "properties" in part or "required" in part]
        if objects and len(objects) == sum(bool(part) for part in parts):
            return self._object(_merged(objects), indent, depth)
        types = list(dict.fromkeys(self._type(part, indent, depth) for part in schema["allOf"]))
        if len(types) == 1:
            return types[0]
        return f"({' & '.join(f'({text})' if ' | ' in text else text for text in types)})"

    def _resolve(self, schema: Any) -> Any:
        """Follow local references; keywords beside `$ref` hold too. One that leads nowhere or into itself is `any`."""
        seen: set[str] = set()
        while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference in seen:
                return True
            seen.add(reference)
            target = self._lookup(reference)
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**target, **beside} if isinstance(target, dict) else target
        return schema

    def _lookup(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return True
        node: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(key)] if key.isdecimal() and int(key) < len(node) else None
            else:
                node = _dict(node).get(key)
        return True if node is None else node


def _dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _variants(schema: Schema) -> list[Any]:
    """Of a union. Beside `properties`, `anyOf` and `oneOf` say which to combine: nothing that a type shows."""
    return [] if "properties" in schema else _list(schema.get("oneOf")) or _list(schema.get("anyOf"))


def _implied_kind(schema: Schema) -> str | None:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


def _merged(parts: list[Schema]) -> Schema:
    return {
        "properties": {name: value for part in parts for name, value in _dict(part.get("properties")).items()},
        "required": [name for part in parts for name in _list(part.get("required"))],
    }


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _leading_comments(schema: Schema, indent: str) -> list[str]:
    lines = []
    if isinstance(schema.get("title"), str):
        lines += [*comment_lines(schema["title"], indent), f"{indent}//"]
    if isinstance(schema.get("description"), str):
        lines += comment_lines(schema["description"], indent)
    if examples := _list(schema.get("examples")):
        lines.append(f"{indent}// Examples:")
        lines += [f"{indent}// - {_literal(example)}" for example in examples]
    return lines


def _trailing_comment(schema: Any) -> str:
    if not isinstance(schema, dict):
        return ""
    notes = []
    if isinstance(schema.get("description"), str):
        notes.append(" ".join(schema["description"].split()))
    if "default" in schema:
        notes.append(_default(schema))
    return f" // {' '.join(notes)}" if notes else ""


def _default(schema: Schema) -> str:
    """An enum's default stands without quotes, as in openai-harmony."""
    value = schema["default"]
    bare = isinstance(value, str) and schema.get("enum") and value.isprintable()
    return f"default: {value if bare else _literal(value)}"
