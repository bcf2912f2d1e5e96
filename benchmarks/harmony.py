"""Cost of the Harmony frontend on one core: parsing a token, rendering 1,000 tokens, a grammar's mask; and how long a
long prompt holds up other streams.

    python benchmarks/harmony.py

Each figure is the best of several runs, so that other load on the machine counts little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import date

import numpy as np

from rose_dist.engine.grammar import GrammarCompiler
from rose_dist.frontend.formats.base import Conversation, Message, ResponseFormat, Tool, ToolCall
from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_vocabulary import SIZE

RUNS = 7
SENTENCES = "The quick brown fox jumps over the lazy dog. Die Würfel sind gefallen: 東京は晴れ 🙂, 3.14159.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country."},
        "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["location", "unit"],
    "additionalProperties": False,
}
TOOLS = [Tool(name=f"get_weather_{i}", description="Gets the weather.", parameters=SCHEMA) for i in range(4)]


def best(run: Callable[[], None]) -> float:
    """Seconds of the fastest of `RUNS`."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def parser_us_per_token(harmony: HarmonyFormat) -> dict[str, float]:
    text = SENTENCES * 8
    call = f"<|channel|>commentary to=functions.get_weather_1 <|constrain|>json<|message|>{text}<|call|>"
    turns = {
        "one long answer": f"<|channel|>final<|message|>{SENTENCES * 700}<|return|>",
        "reasoning, then a call": f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant{call}",
        "messages of 10 tokens": "<|start|>assistant<|channel|>analysis<|message|>one two three four<|end|>" * 500,
    }
    conversation = Conversation(messages=[], tools=TOOLS)
    figures = {}
    for name, text in turns.items():
        ids = harmony.vocabulary.encode_with_control(text)

        def run(ids: list[int] = ids) -> None:
            parser = harmony.parser(conversation)
            deltas = []
            for token_id in ids:
                deltas += parser.feed(token_id)
            deltas += parser.finish()

        figures[f"{name} ({len(ids)} ids)"] = best(run) / len(ids) * 1e6
    return figures


def render_ms_per_1000_tokens(harmony: HarmonyFormat) -> dict[str, float]:
    user = Message(role="user", content=SENTENCES * 3)
    call = ToolCall(id="1", name="get_weather_1", arguments='{"location": "東京", "unit": "celsius"}')
    turn = [
        user,
        Message(role="assistant", reasoning=SENTENCES, tool_calls=[call]),
        Message(role="tool", tool_call_id="1", content=SENTENCES),
        Message(role="assistant", content=SENTENCES * 2),
    ]
    conversations = {
        "one question, 4 tools": Conversation(messages=[user], tools=TOOLS),
        "5 turns with calls, 4 tools": Conversation(messages=[*turn * 5, user], tools=TOOLS),
        "100 turns with calls, 4 tools": Conversation(messages=[*turn * 100, user], tools=TOOLS),
    }
    figures = {}
    for name, conversation in conversations.items():
        tokens = len(harmony.render(conversation))
        figures[f"{name} ({tokens} ids)"] = best(lambda c=conversation: harmony.render(c)) / tokens * 1e6
    return figures


def pause_ms(harmony: HarmonyFormat) -> dict[str, float]:
    """The longest pause of an event loop that wakes every millisecond, while a thread renders about 1 MB."""
    texts = {
        "prose": SENTENCES * 9_000,
        "code": "def f(x, y):\n    return {'a': x[0] + y.z, \"b\": 3.14159}\n\n" * 18_000,
        "Japanese without a space": "東京は晴れです。今日も明日も、" * 22_000,
    }
    return {
        f"{name}, {len(text.encode()) / 1e6:.1f} MB": min(asyncio.run(_pause_ms(harmony, text)) for _ in range(3))
        for name, text in texts.items()
    }


async def _pause_ms(harmony: HarmonyFormat, text: str) -> float:
    conversation = Conversation(messages=[Message(role="user", content=text)])
    rendering = asyncio.create_task(asyncio.to_thread(harmony.render, conversation))
    longest, last = 0.0, time.perf_counter()
    while not rendering.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest * 1e3


def mask_us(harmony: HarmonyFormat, compiler: GrammarCompiler) -> dict[str, float]:
    conversation = Conversation(messages=[], response_format=ResponseFormat(kind="json_schema", schema=SCHEMA))
    answer = '{"location": "Paris, France", "unit": "celsius", "days": 3}'
    reasoning = f"<|channel|>analysis<|message|>{SENTENCES * 40}<|end|><|start|>assistant"
    text = f"{reasoning}<|channel|>final<|message|>{answer}<|return|>"
    ids = harmony.vocabulary.encode_with_control(text)
    body = len(harmony.vocabulary.encode_with_control(reasoning))
    grammar_text = harmony.grammar(conversation)
    assert grammar_text is not None
    begin = time.perf_counter()
    grammar = compiler.compile(grammar_text)
    compile_us = (time.perf_counter() - begin) * 1e6
    masks = compiler.empty_masks(1)
    fill, accept = [], []
    for token_id in ids:
        begin = time.perf_counter()
        compiler.fill_masks([(grammar, 0)], masks)
        filled = time.perf_counter()
        grammar.accept(token_id)
        accept.append(time.perf_counter() - filled)
        fill.append(filled - begin)
    microseconds = np.array(fill) * 1e6
    return {
        "compile": compile_us,
        f"mask in reasoning, mean of {body}": float(microseconds[:body].mean()),
        f"mask in the answer, mean of {len(ids) - body}": float(microseconds[body:].mean()),
        "mask, largest": float(microseconds.max()),
        "accept, mean": float(np.mean(accept) * 1e6),
    }


def report(title: str, figures: dict[str, float], unit: str) -> None:
    print(title)
    for name, value in figures.items():
        print(f"  {name:<50} {value:10.2f} {unit}")


def main() -> None:
    harmony = HarmonyFormat(today=lambda: date(2025, 6, 28))
    compiler = GrammarCompiler(harmony.vocabulary.token_bytes, SIZE)
    report("parser, deltas included", parser_us_per_token(harmony), "us/token")
    report("renderer", render_ms_per_1000_tokens(harmony), "ms per 1,000 tokens")
    report("longest pause of other streams while a prompt is rendered", pause_ms(harmony), "ms")
    report(f"grammar over {SIZE} ids", mask_us(harmony, compiler), "us")


if __name__ == "__main__":
    main()
