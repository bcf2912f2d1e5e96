"""Random token sequences: no exception, the same reply whatever the step sizes, no control text in any field.

`ROSE_HARMONY_FUZZ` sets how many sequences are tried (default 20,000; 200,000 take about 12 s).
"""

import os
import random

from harmony_replies import BUILTIN_TOOLS, TOOLS, Reply, parse, parse_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.frontend.formats.harmony_header import OfferedTools, parse_header
from rose_dist.frontend.formats.harmony_parser import HarmonyParser
from rose_dist.frontend.formats.harmony_vocabulary import CONTROL_TEXT, END, START, HarmonyVocabulary

COUNT = int(os.environ.get("ROSE_HARMONY_FUZZ", "20000"))

HEADER_WORDS = [
    "assistant", "user", "tool", "analysis", "commentary", "final", " to=functions.get_weather", " to=", "functions.f",
    " to=shelljson", " to=user", " json", "json", " code", "?", " We need", "bash", ":", "\n", " to=browser.search",
]  # fmt: skip
BODY_WORDS = ["Hello", " world", '{"a": 1}', " 東京", "🙂", "é", "<", "|", ">", "to=f"]
TOOL_SETS = [TOOLS, BUILTIN_TOOLS, OfferedTools()]


def _alphabet(vocabulary: HarmonyVocabulary) -> list[list[list[int]]]:
    """Groups of token runs; each group is drawn from as often as the others."""
    single_bytes = [[vocabulary.token_bytes.index(bytes([byte]))] for byte in range(256)]
    control = [[token_id] for token_id in CONTROL_TEXT]
    return [
        control,
        control,
        [vocabulary.encode(word) for word in HEADER_WORDS],
        [vocabulary.encode(word) for word in BODY_WORDS],
        single_bytes,
        [[-5], [200_000], [201_087], [201_088], [10**9]],
    ]


def _sequence(rng: random.Random, alphabet: list[list[list[int]]]) -> list[int]:
    runs = [rng.choice(rng.choice(alphabet)) for _ in range(rng.randint(0, 24))]
    if rng.random() < 0.2:
        runs += [[rng.randrange(200_000)] for _ in range(5)]
    return [token_id for run in runs for token_id in run]


def _parse_in_steps(ids, vocabulary, tools, rng) -> Reply:
    """As an API server does: several tokens a step, the messages read between steps."""
    parser = HarmonyParser(vocabulary, tools)
    deltas = []
    position = 0
    while position < len(ids):
        step = ids[position : position + rng.randint(1, 8)]
        position += len(step)
        deltas += [delta for token_id in step for delta in parser.feed(token_id)]
        assert all(message.content is not None for message in parser.messages)
    return Reply.of([*deltas, *parser.finish()], parser.messages)


def _fields(reply: Reply) -> list[str]:
    names = [
        field for m in reply.messages for field in (m.role, m.channel or "", m.recipient or "", m.content_type or "")
    ]
    texts = [message.content for message in reply.messages]
    return [reply.reasoning, reply.content, *(part for call in reply.calls for part in call), *names, *texts]


def _reply_from_messages(reply: Reply, tools: OfferedTools) -> tuple[str, str, list[tuple[str, str]]]:
    """The documented rules applied to whole messages: what the deltas must add up to."""
    reasoning, content, calls = [], [], []
    for message in reply.messages:
        name = message.recipient and tools.resolve(message.recipient)
        foreign = message.recipient not in (None, "user", "assistant", "all")
        if message.role != "assistant":
            continue
        if name:
            calls.append((name, message.content))
        elif message.channel == "final" or (message.channel in (None, "commentary") and not foreign):
            content.append(message.content)
        else:
            reasoning.append(message.content)
    return "\n".join(filter(None, reasoning)), "\n".join(filter(None, content)), calls


def test_random_sequences(vocabulary):
    rng = random.Random(20250628)
    alphabet = _alphabet(vocabulary)
    for _ in range(COUNT):
        ids = _sequence(rng, alphabet)
        tools = rng.choice(TOOL_SETS)
        whole = parse_ids(ids, vocabulary, tools)
        assert _parse_in_steps(ids, vocabulary, tools, rng) == whole, ids
        fields = _fields(whole)
        assert not any(text in field for text in CONTROL_TEXT.values() for field in fields), ids
        assert (whole.reasoning, whole.content) == _reply_from_messages(whole, tools)[:2], ids
        expected_calls = _reply_from_messages(whole, tools)[2]
        # A header cut short by the end of the output is in the messages but calls nothing: its name may go on.
        assert whole.calls in (expected_calls, expected_calls[:-1]), ids


def test_truncation_anywhere_gives_a_prefix(vocabulary):
    text = (
        "<|channel|>analysis<|message|>Naïve 東京 🙂?<|end|><|start|>assistant<|channel|>commentary<|message|>Looking."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "é"}<|call|>'
    )
    ids = vocabulary.encode_with_control(text)
    whole = parse(text, vocabulary)
    for end in range(len(ids)):
        part = parse_ids(ids[:end], vocabulary)
        assert whole.reasoning.startswith(part.reasoning.rstrip("\ufffd"))
        assert whole.content.startswith(part.content)
        assert not part.calls or (part.calls[0][0] == "f" and whole.calls[0][1].startswith(part.calls[0][1]))


@settings(max_examples=300)
@given(text=st.text(), opened=st.booleans())
def test_any_header_text_is_read(text, opened):
    header = parse_header(text, TOOLS, role_first=opened)
    assert "<|channel|>" not in f"{header.channel}{header.recipient}{header.content_type}{header.leftover}"


@settings(max_examples=200)
@given(st.lists(st.integers(), max_size=30))
def test_any_integers_are_tokens(vocabulary, ids):
    parse_ids([START, END, *ids], vocabulary)
