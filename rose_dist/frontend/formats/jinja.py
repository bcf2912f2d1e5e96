"""The checkpoint's own jinja chat template as a chat format.

The template is rendered as transformers renders it. Its text becomes token ids with one difference: a control token
that a client wrote into a message stays ordinary text. Each such token is broken by a sentinel character before
rendering; the sentinel is taken out again when the pieces between the template's own control tokens are encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from rose_dist.frontend.formats.base import ChatParser, Conversation, FormatError, Message, Tool, ToolCall
from rose_dist.frontend.formats.call_form import CallForm, form_of
from rose_dist.frontend.formats.tagged import ReasoningTags, TaggedParser
from rose_dist.frontend.formats.tagged_grammar import tagged_grammar
from rose_dist.frontend.grammar import token
from rose_dist.frontend.tokenizer import Detokenizer, Tokenizer

_SENTINELS = range(0xE000, 0xF900)
"""Unicode's private use area; one that the conversation doesn't contain is taken."""


class JinjaFormat:
    """A `ChatFormat` over a template; reasoning in `<think>` where the vocabulary has it, calls in the model's form."""

    name = "jinja"

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """
        Raises:
            FormatError: the template is not valid jinja.
        """
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.eos_ids
        try:
            self._template = _environment().from_string(template)
            self._template.globals = dict(self._template.globals)  # a ChainMap there costs 30 us a rendering
        except jinja2.TemplateError as error:
            raise FormatError(f"The chat template can't be compiled: {error}") from error
        self._variables = {f"{name}_token": tokenizer.special_token(f"{name}_token") for name in ("bos", "eos", "pad")}
        self._tags = ReasoningTags(tokenizer.added.get("<think>"), tokenizer.added.get("</think>"))
        self._form = form_of(tokenizer, template)
        self._table = _table(tokenizer, self._form)
        self._opens_reasoning = lru_cache(64)(self._probe_reasoning)

    def render(self, conversation: Conversation) -> list[int]:
        raw = msgspec.json.encode(conversation).decode()
        if not any(character in raw for character in self._first_characters):
            return self._tokenizer.encode_template(self._text(_context(conversation, str)))
        sentinel = next((c for c in map(chr, _SENTINELS) if c not in raw), None)
        if sentinel is None:
            raise FormatError("The conversation has all characters from U+E000 to U+F8FF; one must be left out")
        text = self._text(_context(conversation, lambda value: self._broken(value, sentinel)))
        ids: list[int] = []
        end = 0
        for match in self._tokenizer.control_pattern.finditer(text):
            ids += self._tokenizer.encode(text[end : match.start()].replace(sentinel, ""))
            ids.append(self._tokenizer.control[match[0]])
            end = match.end()
        return ids + self._tokenizer.encode(text[end:].replace(sentinel, ""))

    def parser(self, conversation: Conversation) -> ChatParser:
        return TaggedParser(
            Detokenizer(self._table),
            self._tags,
            self._form,
            stop_ids=self.stop_ids,
            in_reasoning=self._reasoning_is_open(conversation),
            tools=frozenset(tool.name for tool in conversation.tools),
        )

    def grammar(self, conversation: Conversation) -> str | None:
        return tagged_grammar(
            conversation,
            self._tags,
            form=self._form,
            terminals=self._terminals,
            stop_ids=self.stop_ids,
            in_reasoning=self._reasoning_is_open(conversation),
        )

    def _terminals(self, text: str) -> str:
        """`text` as a grammar writes it: its control tokens as tokens, the rest as strings."""
        terminals, end = [], 0
        for match in self._tokenizer.control_pattern.finditer(text):
            terminals += [json.dumps(text[end : match.start()])] if match.start() > end else []
            terminals.append(token(self._tokenizer.control[match[0]]))
            end = match.end()
        return " ".join([*terminals, *([json.dumps(text[end:])] if end < len(text) else [])])

    def _reasoning_is_open(self, conversation: Conversation) -> bool:
        """Whether the generation prompt already opens the reasoning, as templates of reasoning models do."""
        if self._tags.opening is None:
            return False
        arguments = dict(conversation.template_arguments)
        if conversation.reasoning_effort is not None:
            arguments["reasoning_effort"] = conversation.reasoning_effort
        return self._opens_reasoning(msgspec.json.encode(arguments, order="deterministic"))

    def _probe_reasoning(self, arguments: bytes) -> bool:
        probe = Conversation(
            messages=[Message(role="user", content="x")], template_arguments=msgspec.json.decode(arguments)
        )
        ids = self.render(probe)
        return self._tags.opening in ids and self._tags.closing not in ids[ids.index(self._tags.opening) :]

    def _text(self, context: dict[str, Any]) -> str:
        try:
            text = self._template.render(**{**self._variables, **context})
            return text.encode("utf-8", "replace").decode()  # escapes in JSON can make half characters
        except (FormatError, RecursionError):
            raise
        except Exception as error:  # a template is a program: whatever it raises is about this conversation
            raise FormatError(f"The chat template can't render this conversation: {error}") from error

    @cached_property
    def _first_characters(self) -> frozenset[str]:
        """Without any of these, strings of a client can't become or complete a control token."""
        return frozenset(token[0] for token in self._tokenizer.control)

    def _broken(self, text: str, sentinel: str) -> str:
        """`text` with the sentinel inside every control token, and after every beginning of one at its end."""
        text = self._tokenizer.control_pattern.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)
        if any(text.endswith(token[:n]) for token in self._tokenizer.control for n in range(1, len(token))):
            text += sentinel
        return text


def _table(tokenizer: Tokenizer, form: CallForm) -> list[bytes]:
    """Bytes of each id as a parser sees them: the tags of calls have text even where they are special tokens."""
    table = tokenizer.visible_with((form.opening, form.closing, "<｜tool▁sep｜>"))
    for tag in form.hidden:
        if tag in tokenizer.added:
            table[tokenizer.added[tag]] = b""
    return table


Mark = Callable[[str], str]
"""What is done to every string of a client's."""


def _context(conversation: Conversation, mark: Mark) -> dict[str, Any]:
    """The variables of a template, named as transformers names them."""
    context: dict[str, Any] = {name: _marked(value, mark) for name, value in conversation.template_arguments.items()}
    if conversation.reasoning_effort is not None:
        context.setdefault("reasoning_effort", conversation.reasoning_effort)
    context["messages"] = [_message(message, mark) for message in conversation.messages]
    context["tools"] = [_tool(tool, mark) for tool in conversation.tools] or None
    context["documents"] = None
    context["add_generation_prompt"] = True
    return context


def _message(message: Message, mark: Mark) -> dict[str, Any]:
    content, reasoning = message.content, message.reasoning
    if message.role == "assistant" and not reasoning and "</think>" in content:
        head, content = content.split("</think>", 1)
        reasoning, content = head.split("<think>", 1)[-1].strip("\n"), content.lstrip("\n")
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": mark(content)}
    if reasoning:
        fields["reasoning_content"] = mark(reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call, mark) for call in message.tool_calls]
    if message.tool_call_id:
        fields["tool_call_id"] = mark(message.tool_call_id)
    if message.name:
        fields["name"] = mark(message.name)
    return fields


def _tool_call(call: ToolCall, mark: Mark) -> dict[str, Any]:
    """Templates print arguments with `tojson`, so valid JSON is handed over as a value."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    function = {"name": mark(call.name), "arguments": _marked(arguments, mark)}
    return {"id": mark(call.id), "type": "function", "function": function}


def _tool(tool: Tool, mark: Mark) -> dict[str, Any]:
    function: dict[str, Any] = {"name": mark(tool.name), "description": mark(tool.description)}
    if tool.parameters is not None:
        function["parameters"] = _marked(tool.parameters, mark)
    return {"type": "function", "function": function}


def _marked(value: Any, mark: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, mark) for item in value]
    return value


@lru_cache(1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training and prints its body here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise FormatError(message)
