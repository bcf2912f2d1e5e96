"""Reads the text of one tool call, between its tags."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from rose_dist.frontend.formats.base import Delta, TextDelta, ToolCallDelta
from rose_dist.frontend.formats.call_form import CallForm, name_of

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class CallText:
    """One call, streamed: its name as soon as that is known, then the raw text of its arguments as it comes.

    Text of another form is delivered when it has ended: as a call if it is one after all (`arguments` first, or
    written as a string), else unchanged as content. A call of a tool that was not offered is content too, and so is
    what follows the call's last bracket.
    """

    def __init__(self, index: int, tools: Collection[str], form: CallForm) -> None:
        """
        Args:
            index: number of the call in the answer.
            tools: names on offer.
        """
        self.is_call = False
        self._index = index
        self._tools = tools
        self._form = form
        self._text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False
        """The last bracket of the arguments was there."""
        self._tail = ""

    def feed(self, text: str) -> Sequence[Delta]:
        if self.is_call:
            return self._arguments(text)
        self._text += text
        head = self._form.head.match(self._text)
        name = None if head is None else name_of(head)
        if head is None or name is None or name not in self._tools:
            return ()
        self.is_call = True
        start = ToolCallDelta(self._index, "", name)
        return [start, *self._arguments(self._text[head.end() :])]

    def finish(self, *, closed: bool) -> Sequence[Delta]:
        """
        Args:
            closed: the closing tag was there; False where the output was cut short.
        """
        if self.is_call:
            rest = self._form.tail.sub("", self._tail, count=1).rstrip()
            return (TextDelta("content", rest),) if rest else ()
        call = _loads(self._text)
        if isinstance(call, dict) and isinstance(name := call.get("name"), str) and name in self._tools:
            self.is_call = True
            arguments = call.get("arguments", call.get("parameters"))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {}, ensure_ascii=False)
            arguments = arguments.encode("utf-8", "replace").decode()  # JSON's escapes can make half characters
            return [ToolCallDelta(self._index, "", name), ToolCallDelta(self._index, arguments)]
        return [TextDelta("content", self._form.opening + self._text + (self._form.closing if closed else ""))]

    def _arguments(self, text: str) -> Sequence[Delta]:
        """What of `text` belongs to the arguments: up to the bracket that closes their first one."""
        end = 0 if self.is_complete else self._end_of_arguments(text)
        self._tail += text[end:]
        return [ToolCallDelta(self._index, text[:end])] if end else ()

    def _end_of_arguments(self, text: str) -> int:
        position = 1 if self._escaped else 0  # the character after a backslash means nothing
        self._escaped = False
        while match := (_INSIDE if self._in_string else _OUTSIDE).search(text, position):
            position = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == "\\":
                self._escaped = position == len(text)
                position += 1
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    self.is_complete = True
                    return position
        return len(text)


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
