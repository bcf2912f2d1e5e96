"""JSON schema to TypeScript: openai-harmony's layout where it is right, and the types that it can't render."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import DeveloperContent, Message, Role, ToolDescription

from rose_dist.frontend.formats.base import FormatError, Tool
from rose_dist.frontend.formats.harmony_prompt import developer_text
from rose_dist.frontend.formats.json_schema_ts import parameters_to_typescript
from rose_dist.frontend.grammar import arguments_part


def _property(schema: dict, **root: object) -> str:
    """The lines of one required property."""
    text = parameters_to_typescript({"type": "object", "properties": {"x": schema}, "required": ["x"], **root})
    return text.removeprefix("{\n").removesuffix("\n}")


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x", "y"]}
POINT_LINES = "    x: number,\n    y: number,\n"

TYPES = [
    (STRING, "x: string,"),
    (INTEGER, "x: number,"),
    ({"type": "null"}, "x: null,"),
    ({}, "x: any,"),
    (True, "x: any,"),
    (False, "x: never,"),
    ({"const": "a"}, 'x: "a",'),
    ({"const": 3}, "x: 3,"),
    ({"enum": ["a", "b"]}, 'x: "a" | "b",'),
    ({"type": "integer", "enum": [1, 2]}, "x: 1 | 2,"),
    ({"enum": ['quo"te', None, True]}, 'x: "quo\\"te" | null | true,'),
    ({"anyOf": [STRING, {"type": "null"}]}, "x: string | null,"),
    ({"oneOf": [STRING, INTEGER, {"type": "number"}]}, "x: string | number,"),
    ({"type": ["string", "null"]}, "x: string | null,"),
    ({"type": ["array", "null"], "items": STRING}, "x: string[] | null,"),
    ({**STRING, "nullable": True}, "x: string | null,"),
    ({"type": "array"}, "x: Array<any>,"),
    ({"type": "array", "items": {"type": "array", "items": STRING}}, "x: string[][],"),
    ({"type": "array", "items": {"enum": ["a", "b"]}}, 'x: ("a" | "b")[],'),
    (
        {"type": "array", "items": {"anyOf": [STRING, POINT]}},
        f"x: (string | {{\n{POINT_LINES}    }})[],",
    ),
    ({"type": "array", "prefixItems": [STRING, INTEGER]}, "x: [string, number],"),
    ({"type": "array", "items": {"allOf": [STRING, {"enum": ["a", "b"]}]}}, 'x: (string & ("a" | "b"))[],'),
    ({"type": "object"}, "x: object,"),
    ({"type": "object", "additionalProperties": False}, "x: {},"),
    ({"type": "object", "additionalProperties": INTEGER}, "x: { [key: string]: number },"),
    (
        {**POINT, "additionalProperties": STRING},
        f"x: {{\n{POINT_LINES}    [key: string]: string,\n    }},",
    ),
    ({"properties": {"a": STRING}}, "x: {\n    a?: string,\n    },"),
    ({"allOf": [POINT]}, f"x: {{\n{POINT_LINES}    }},"),
    (
        {"allOf": [POINT, {"properties": {"z": STRING}}]},
        f"x: {{\n{POINT_LINES}    z?: string,\n    }},",
    ),
    ({**POINT, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, f"x: {{\n{POINT_LINES}    }},"),
    ({**STRING, "description": "one\ntwo\r\nthree\u2028four"}, "// one\n// two\n// three\n// four\nx: string,"),
    ({**STRING, "description": "*/ } // namespace"}, "// */ } // namespace\nx: string,"),
    ({**STRING, "default": "a\nb"}, 'x: string, // default: "a\\nb"'),
    ({"enum": ["a", "b"], "default": "a"}, 'x: "a" | "b", // default: a'),
    ({"type": "unheard-of"}, "x: any,"),
    ({"type": "object", "properties": ["not", "a", "map"], "required": 3}, "x: object,"),
    ({"anyOf": []}, "x: any,"),
]


@pytest.mark.parametrize(("schema", "expected"), TYPES)
def test_type(schema, expected):
    assert _property(schema) == expected


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("#/$defs/Point", "x: {\n    x: number,\n    y: number,\n    },"),
        ("#/$defs/Alias", "x: {\n    x: number,\n    y: number,\n    },"),
        ("#/$defs/a~1b%20c", "x: string,"),
        ("#/$defs/Missing", "x: any,"),
        ("#/$defs/Loop", "x: any,"),
        ("https://example.com/schema", "x: any,"),
        ("#/$defs/List", "x: {\n    value?: number,\n    next?: any | null,\n    },"),
    ],
)
def test_reference(reference, expected):
    definitions = {
        "Point": POINT,
        "Alias": {"$ref": "#/$defs/Point"},
        "a/b c": STRING,
        "Loop": {"$ref": "#/$defs/Loop"},
        "List": {
            "type": "object",
            "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/List"}, {"type": "null"}]}},
        },
    }
    assert _property({"$ref": reference}, **{"$defs": definitions}) == expected


def test_keywords_beside_a_reference_hold():
    text = _property({"$ref": "#/$defs/S", "description": "Why.", "default": "d"}, **{"$defs": {"S": STRING}})
    assert text == '// Why.\nx: string, // default: "d"'


@pytest.mark.parametrize(("name", "expected"), [("a-b", '"a-b"'), ("two\nlines", '"two\\nlines"'), ("$ok_1", "$ok_1")])
def test_property_names_can_not_leave_their_place(name, expected):
    assert parameters_to_typescript({"type": "object", "properties": {name: STRING}}) == f"{{\n{expected}?: string,\n}}"


def test_exponential_references_are_refused():
    definitions = {f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "abcd"}} for i in range(30)}
    with pytest.raises(FormatError, match="fewer references"):
        parameters_to_typescript({"$ref": "#/$defs/d0", "$defs": definitions})


@pytest.mark.parametrize("place", ["description", "title", "enum", "const"])
def test_references_to_a_large_definition_are_refused(place):
    large = "x" * 100_000
    definition = {place: [large] if place == "enum" else large}
    properties = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(1000)}
    with pytest.raises(FormatError, match="fewer references"):
        parameters_to_typescript({"properties": properties, "$defs": {"large": definition}})


def test_many_large_tools_are_refused():
    tools = [Tool(name=f"f{i}", description="x" * 100_000) for i in range(30)]
    with pytest.raises(FormatError, match="2000000 characters"):
        developer_text("", tools, None)


def test_deep_nesting_ends():
    schema: dict = STRING
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    assert "any[]" in parameters_to_typescript({"type": "object", "properties": {"x": schema}})


def test_function_without_arguments():
    for parameters in (
        None,
        {},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": False},
    ):
        assert "type f = () => any;" in developer_text("", [Tool(name="f", parameters=parameters)], None)


LIBRARY_IS_RIGHT = {
    "get_location": ("Gets the location of the user.", None),
    "two_lines": ("First line.\nSecond line.", None),
    "get_current_weather": (
        "Gets the current weather in the provided location.",
        {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "default": 3},
            },
            "required": ["location"],
        },
    ),
    "kitchensink": (
        "A function with various complex schemas.",
        {
            "description": "params object",
            "type": "object",
            "properties": {
                "string": {"type": "string", "title": "STRING", "description": "A string", "examples": ["hello", "w"]},
                "string_nullable": {"type": "string", "nullable": True, "default": "the default"},
                "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
                "numbers": {"type": "array", "items": {"type": "number"}},
                "either": {"type": ["number", "string"], "default": -1},
                "oneof": {
                    "description": "a oneof",
                    "default": 20,
                    "oneOf": [
                        {"type": "string", "default": "default_string_in_oneof"},
                        {"type": "number", "description": "numbers can happen too"},
                    ],
                },
                "nested": {
                    "type": "object",
                    "properties": {"a": {"type": "boolean", "description": "Inner."}, "b": {"type": "string"}},
                    "required": ["a"],
                },
            },
        },
    ),
}


def test_layout_is_the_librarys_where_it_is_right(vocabulary, library):
    tools = [Tool(name=name, description=text, parameters=schema) for name, (text, schema) in LIBRARY_IS_RIGHT.items()]
    descriptions = [ToolDescription.new(tool.name, tool.description, parameters=tool.parameters) for tool in tools]
    content = DeveloperContent.new().with_instructions("Be brief.").with_function_tools(descriptions)
    theirs = library.render(Message.from_role_and_content(Role.DEVELOPER, content))
    assert f"<|start|>developer<|message|>{developer_text('Be brief.', tools, None)}<|end|>" == vocabulary.decode(
        theirs
    )


keywords = st.sampled_from(
    ["type", "properties", "items", "anyOf", "allOf", "$ref", "$defs", "enum", "required", "description", "default"]
)
atoms = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.text(max_size=5)
    | st.sampled_from(["object", "array", "string", "#", "#/$defs/x", "#/properties/x"])
)
json_values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.dictionaries(keywords | st.text(max_size=4), json_values, max_size=5))
def test_any_json_object_is_rendered_or_refused(schema):
    """Clients send what they like."""
    tool = Tool(name="f", description="D", parameters=schema)
    with suppress(FormatError):
        text = developer_text("", [tool], None)
        assert text.startswith("# Tools\n\n## functions\n\nnamespace functions {\n\n// D\ntype f = (")
        assert text.endswith(") => any;\n\n} // namespace functions")
    with suppress(FormatError):
        arguments_part("arguments", tool)
