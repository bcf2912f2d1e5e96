"""Conversations to Harmony ids, such that a sampled turn, sent back by the client, becomes the same ids again.

Canonical forms, those that gpt-oss samples most; `X` and `Y` are text of the API's message:

| part of an assistant message | rendered as |
|---|---|
| reasoning, unless a later message is a final answer | `<|channel|>analysis<|message|>X<|end|>` |
| content, without calls | `<|channel|>final<|message|>X<|end|>` (sampled with `<|return|>`) |
| content, with calls: a preamble | `<|channel|>commentary<|message|>X<|end|>` |
| call of function f | `<|channel|>commentary to=functions.f <|constrain|>json<|message|>Y<|call|>` |
| call of built-in tool b | `<|channel|>analysis to=b code<|message|>Y<|call|>` |
| result of f | `<|start|>functions.f to=assistant<|channel|>commentary<|message|>X<|end|>` |

What the API's messages can't carry comes back in this form: another header for the same call, several analysis
messages in one turn (one message, joined by line feeds), and a tokenisation other than the text's own.
Several calls of one message are each followed by their own result, as in sampling, where a call ends the turn.
"""

from __future__ import annotations

import re
from datetime import date
from itertools import takewhile

from rose_dist.frontend.formats.base import TOOL_NAME, Conversation, FormatError, Message, ToolCall
from rose_dist.frontend.formats.harmony_header import BUILTIN_NAMESPACES, offered_builtins
from rose_dist.frontend.formats.harmony_prompt import EFFORTS, MODEL_IDENTITY, developer_text, system_text
from rose_dist.frontend.formats.harmony_vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    HarmonyVocabulary,
)

_BUILTIN_NAME = re.compile(rf"({'|'.join(BUILTIN_NAMESPACES)})(\.{TOOL_NAME.pattern})?")
_EFFORT_LINE = re.compile(rf"^Reasoning: *({'|'.join(EFFORTS)}) *$\n?", re.MULTILINE)


def render(conversation: Conversation, vocabulary: HarmonyVocabulary, today: date) -> list[int]:
    """Prompt ids, ending in the generation prompt `<|start|>assistant`.

    Raises:
        FormatError: the conversation can't be rendered; the message names the offending part.
    """
    return _Renderer(conversation, vocabulary).render(today)


class _Renderer:
    def __init__(self, conversation: Conversation, vocabulary: HarmonyVocabulary):
        self._conversation = conversation
        self._encode = vocabulary.encode
        self._ids: list[int] = []
        self._functions = {tool.name for tool in conversation.tools}
        self._builtins = offered_builtins(conversation)
        self._called: dict[str, str] = {}
        """Id of a call in the history to its recipient; an id that clients use again means its latest call."""

    def render(self, today: date) -> list[int]:
        messages = self._conversation.messages
        leading = messages[0].content if messages and messages[0].role in ("system", "developer") else ""
        effort, instructions = self._effort(leading)
        system = system_text(
            identity=self._identity(),
            today=today,
            effort=effort,
            builtins=self._builtins,
            has_functions=bool(self._functions),
        )
        self._message("system", system)
        developer = developer_text(instructions, self._conversation.tools, self._conversation.response_format)
        if developer:
            self._message("developer", developer)
        self._history(messages, begin=1 if leading else 0)
        self._ids += [START, *self._encode("assistant")]
        return self._ids

    def _history(self, messages: list[Message], begin: int) -> None:
        """Reasoning of a turn that has got its final answer is dropped; that of a running tool loop is kept."""
        answer = max((i for i, message in enumerate(messages) if _is_answer(message)), default=-1)
        rendered_results: set[int] = set()
        for i in range(begin, len(messages)):
            message = messages[i]
            if message.role == "assistant":
                following = takewhile(lambda j: messages[j].role == "tool", range(i + 1, len(messages)))
                results = {j: messages[j] for j in following}
                rendered_results |= self._assistant(message, results, keep_reasoning=i > answer)
            elif message.role == "tool":
                if i not in rendered_results:
                    self._result(message, self._recipient_of(message, i))
            elif message.role == "user":
                self._message("user", message.content)
            elif message.content:
                self._message("developer", developer_text(message.content, [], None))

    def _assistant(self, message: Message, results: dict[int, Message], *, keep_reasoning: bool) -> set[int]:
        """Render one turn, each call with its result, and return the positions of those results."""
        if message.reasoning and keep_reasoning:
            self._message("assistant", message.reasoning, channel="analysis")
        if message.content:
            self._message("assistant", message.content, channel="commentary" if message.tool_calls else "final")
        rendered: set[int] = set()
        for call in message.tool_calls:
            recipient = self._recipient(call.name)
            self._called[call.id] = recipient
            self._call(call, recipient)
            for position, result in results.items():
                if result.tool_call_id == call.id and position not in rendered:
                    self._result(result, recipient)
                    rendered.add(position)
                    break
        return rendered

    def _call(self, call: ToolCall, recipient: str) -> None:
        if recipient.startswith("functions."):
            header = [*self._encode(f"commentary to={recipient} "), CONSTRAIN, *self._encode("json")]
        else:
            header = self._encode(f"analysis to={recipient} code")
        self._ids += [START, *self._encode("assistant"), CHANNEL, *header, MESSAGE]
        self._ids += [*self._encode(call.arguments), CALL]

    def _result(self, message: Message, recipient: str) -> None:
        channel = "commentary" if recipient.startswith("functions.") else "analysis"
        self._message(f"{recipient} to=assistant", message.content, channel=channel)

    def _message(self, author: str, text: str, *, channel: str = "") -> None:
        self._ids += [START, *self._encode(author)]
        if channel:
            self._ids += [CHANNEL, *self._encode(channel)]
        self._ids += [MESSAGE, *self._encode(text), END]

    def _recipient_of(self, message: Message, position: int) -> str:
        if message.tool_call_id in self._called:
            return self._called[message.tool_call_id]
        if message.name:
            return self._recipient(message.name)
        raise FormatError(
            f"messages[{position}] answers the tool call {message.tool_call_id!r}, which no earlier assistant message "
            "makes; give the tool_call_id of one, or the tool's name"
        )

    def _recipient(self, name: str) -> str:
        """Names go into headers, which have no escape: one that holds anything but name characters is refused."""
        builtin = _BUILTIN_NAME.fullmatch(name)
        if builtin and name not in self._functions and (builtin[1] in self._builtins or "." in name):
            return name
        if TOOL_NAME.fullmatch(name):
            return f"functions.{name}"
        raise FormatError(
            f"tool name {name!r} in messages is not valid: 1 to 64 of the characters a-z, A-Z, 0-9, _ and - are allowed"
        )

    def _identity(self) -> str:
        identity = self._conversation.template_arguments.get("model_identity", MODEL_IDENTITY)
        if not isinstance(identity, str):
            raise FormatError(f"model_identity must be a string, not {identity!r}")
        return identity

    def _effort(self, leading: str) -> tuple[str, str]:
        """The effort, and the instructions without a line `Reasoning: high`, by which some clients set it."""
        requested = self._conversation.reasoning_effort or self._conversation.template_arguments.get("reasoning_effort")
        if requested is not None and requested not in EFFORTS:
            raise FormatError(f"reasoning_effort must be one of low, medium and high, not {requested!r}")
        line = _EFFORT_LINE.search(leading)
        if line is None:
            return requested or "medium", leading
        return requested or line[1], leading[: line.start()] + leading[line.end() :]


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls
