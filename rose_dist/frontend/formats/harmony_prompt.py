"""The text of Harmony's system and developer messages. Wording and layout are those that gpt-oss was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date

from rose_dist.frontend.formats.base import TOOL_NAME, FormatError, ResponseFormat, Tool
from rose_dist.frontend.formats.json_schema_ts import comment_lines, parameters_to_typescript

MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
EFFORTS = ("low", "medium", "high")

_MOST_CHARACTERS = 2_000_000
"""More than fits into the context; where references blow tools up beyond it, that is told before it takes minutes."""

_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_FUNCTIONS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."

_PYTHON = """\
Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool \
should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive at \
'/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. Depends on the \
cluster."""

_BROWSER = """\
Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)"""

BROWSER_TOOLS = [
    Tool(
        name="search",
        description="Searches for information related to `query` and displays `topn` results.",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "topn": {"type": "number", "default": 10},
                "source": {"type": "string"},
            },
            "required": ["query"],
        },
    ),
    Tool(
        name="open",
        description="""\
Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` lines.
Valid link ids are displayed with the formatting: `【{id}†.*】`.
If `cursor` is not provided, the most recent page is implied.
If `id` is a string, it is treated as a fully qualified URL associated with `source`.
If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on the most \
relevant passage, if available.
Use this function without `id` to scroll to a new location of an opened page.""",
        parameters={
            "type": "object",
            "properties": {
                "id": {"type": ["number", "string"], "default": -1},
                "cursor": {"type": "number", "default": -1},
                "loc": {"type": "number", "default": -1},
                "num_lines": {"type": "number", "default": -1},
                "view_source": {"type": "boolean", "default": False},
                "source": {"type": "string"},
            },
        },
    ),
    Tool(
        name="find",
        description="Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
        parameters={
            "type": "object",
            "properties": {"pattern": {"type": "string"}, "cursor": {"type": "number", "default": -1}},
            "required": ["pattern"],
        },
    ),
]


def system_text(*, identity: str, today: date, effort: str, builtins: Iterable[str], has_functions: bool) -> str:
    sections = [
        f"{identity}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {today.isoformat()}",
        f"Reasoning: {effort}",
    ]
    tools = [_builtin_section(name) for name in sorted(set(builtins))]
    if tools:
        sections += ["# Tools", *tools]
    sections.append(f"{_CHANNELS}\n{_FUNCTIONS_CHANNEL}" if has_functions else _CHANNELS)
    return "\n\n".join(sections)


def developer_text(instructions: str, tools: list[Tool], response_format: ResponseFormat | None) -> str:
    """Empty if there is nothing to say.

    Raises:
        FormatError: a tool's name or schema can't be rendered.
    """
    sections = []
    if instructions:
        sections += ["# Instructions", instructions]
    if tools:
        sections += ["# Tools", f"## functions\n\n{_namespace('functions', tools)}"]
    if response_format is not None and response_format.kind == "json_schema":
        lines = [f"## {response_format.name}\n", *comment_lines(response_format.description)]
        schema = json.dumps(response_format.schema, ensure_ascii=False, separators=(",", ":"))
        sections += ["# Response Formats", "\n".join([*lines, schema])]
    return "\n\n".join(sections)


def _builtin_section(name: str) -> str:
    if name == "python":
        return f"## python\n\n{_PYTHON}"
    return "\n".join(["## browser\n", *comment_lines(_BROWSER), _namespace("browser", BROWSER_TOOLS)])


def _namespace(name: str, tools: list[Tool]) -> str:
    lines = [f"namespace {name} {{\n"]
    left = _MOST_CHARACTERS
    for tool in tools:
        lines.append(_function(tool))
        left -= len(lines[-1])
        if left < 0:
            raise FormatError(f"the tools' descriptions and schemas come to more than {_MOST_CHARACTERS} characters")
    return "\n".join([*lines, f"}} // namespace {name}"])


def _function(tool: Tool) -> str:
    if not TOOL_NAME.fullmatch(tool.name):
        raise FormatError(
            f"tool name {tool.name!r} is not valid: 1 to 64 of the characters a-z, A-Z, 0-9, _ and - are allowed"
        )
    try:
        arguments = parameters_to_typescript(tool.parameters or {"type": "object"})
    except FormatError as error:
        raise FormatError(f"tool {tool.name}: {error}") from error
    takes = "()" if arguments in ("{}", "object") else f"(_: {arguments})"
    return "\n".join([*comment_lines(tool.description), f"type {tool.name} = {takes} => any;\n"])
