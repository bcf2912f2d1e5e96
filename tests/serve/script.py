"""What the scripted model says: a loop of three tool calls, a plain answer, and a plain answer where JSON is asked for.

The texts are the test's data: the model learns to emit exactly these (`scripted_model.py`), tests look for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.frontend.formats.base import Conversation, Message, ResponseFormat, Tool, ToolCall

TOOLS = [
    Tool(
        name="find_station",
        description="The stations of a city.",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        name="departures",
        parameters={
            "type": "object",
            "properties": {"station": {"type": "integer", "minimum": 1, "maximum": 9999}},
            "required": ["station"],
            "additionalProperties": False,
        },
    ),
    Tool(
        name="book",
        description="Book seats on a train.",
        parameters={
            "type": "object",
            "properties": {
                "train": {"type": "string", "enum": ["ICE 10", "ICE 18"]},
                "seats": {"type": "integer", "minimum": 1, "maximum": 8},
            },
            "required": ["train", "seats"],
            "additionalProperties": False,
        },
    ),
]
REQUEST = "Two seats from Köln to Paris, please."


@dataclass(frozen=True)
class Call:
    reasoning: str
    name: str
    arguments: str
    result: str


CALLS = [
    Call("The station's number comes first.", "find_station", '{"city": "Köln"}', '{"station": 812}'),
    Call("Now what leaves from 812.", "departures", '{"station": 812}', '["ICE 10 at 14:43", "ICE 18 at 16:43"]'),
    Call("ICE 10 is the next one. 🚄", "book", '{"train": "ICE 10", "seats": 2}', "Booked: seats 31 and 32"),
]
CONCLUSION = "All done; tell them the seats."
ANSWER = "Booked 🎉: ICE 10 at 14:43, seats 31 and 32."

QUESTION = "What is the capital of France?"
PLAIN_REASONING = "An easy one: France → Paris."
PLAIN_ANSWER = "The capital of France is **Paris** 🗼."

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "country": {"enum": ["France", "Germany"]},
        "rivers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "country", "rivers"],
    "additionalProperties": False,
}


def instructions(ticket: int) -> str:
    """The model ignores the number of 3 digits. With one of its own, a test finds nothing of its loop in the cache."""
    return f"You book trains. Never guess. Ticket {ticket}."


def tool_loop(ticket: int, results: int, *, with_reasoning: bool) -> Conversation:
    """The loop after `results` results; clients differ in whether they send the reasoning back."""
    messages = [Message(role="system", content=instructions(ticket)), Message(role="user", content=REQUEST)]
    for number, call in enumerate(CALLS[:results]):
        call_id = f"call_{number}"
        made = ToolCall(id=call_id, name=call.name, arguments=call.arguments)
        reasoning = call.reasoning if with_reasoning else ""
        messages.append(Message(role="assistant", reasoning=reasoning, tool_calls=[made]))
        messages.append(Message(role="tool", tool_call_id=call_id, content=call.result))
    return Conversation(messages=messages, tools=TOOLS)


def lessons(ticket: int) -> list[tuple[Conversation, str]]:
    """Each conversation with the reply to it, control tokens written out."""
    plain = Conversation(messages=[Message(role="user", content=QUESTION)])
    city = ResponseFormat(kind="json_schema", schema=CITY_SCHEMA, name="city")
    answer = _reply(PLAIN_REASONING, f"<|channel|>final<|message|>{PLAIN_ANSWER}<|return|>")
    return [
        *(
            (tool_loop(ticket, results, with_reasoning=kept), _loop_reply(results))
            for kept in (True, False)
            for results in range(len(CALLS) + 1)
        ),
        (plain, answer),
        (Conversation(messages=plain.messages, response_format=city), answer),
    ]


def _loop_reply(results: int) -> str:
    if results == len(CALLS):
        return _reply(CONCLUSION, f"<|channel|>final<|message|>{ANSWER}<|return|>")
    call = CALLS[results]
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
    return _reply(call.reasoning, f"{header}<|message|>{call.arguments}<|call|>")


def _reply(reasoning: str, rest: str) -> str:
    return f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant{rest}"
