"""A sampled turn, parsed and sent back by the client, renders to the ids that were sampled: the prefix cache hits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.frontend.formats.base import Conversation, Message, TextDelta, Tool, ToolCall, ToolCallDelta
from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    CONTROL_TEXT,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyVocabulary,
)

TOOLS = [Tool(name="get_weather", parameters={"type": "object", "properties": {}}), Tool(name="web-browsing")]

text = st.text(max_size=40) | st.sampled_from([*CONTROL_TEXT.values(), " ", "\n\n", "🙂", "{}", '{"city": "東京"}'])
words = text.filter(bool)


def sample_message(vocabulary: HarmonyVocabulary, channel: str, body: str, end: int) -> list[int]:
    return [CHANNEL, *vocabulary.encode(channel), MESSAGE, *vocabulary.encode(body), end]


def sample_turn(
    vocabulary: HarmonyVocabulary,
    *,
    reasoning: str = "",
    preamble: str = "",
    call: tuple[str, str] | None = None,
    answer: str = "",
) -> list[int]:
    """A turn in the forms that gpt-oss samples most, as it follows the generation prompt."""
    following = [START, *vocabulary.encode("assistant")]
    messages = []
    if reasoning:
        messages.append(sample_message(vocabulary, "analysis", reasoning, END))
    if preamble:
        messages.append(sample_message(vocabulary, "commentary", preamble, END))
    if call is None:
        messages.append(sample_message(vocabulary, "final", answer, RETURN))
    else:
        name, arguments = call
        header = [*vocabulary.encode(f"commentary to=functions.{name} "), CONSTRAIN, *vocabulary.encode("json")]
        messages.append([CHANNEL, *header, MESSAGE, *vocabulary.encode(arguments), CALL])
    ids = messages[0]
    for message in messages[1:]:
        ids = [*ids, *following, *message]
    return ids


def reply_message(harmony: HarmonyFormat, conversation: Conversation, ids: list[int], call_id: str) -> Message:
    """What a client keeps of the reply."""
    parser = harmony.parser(conversation)
    deltas = [delta for token_id in ids for delta in parser.feed(token_id)]
    assert parser.finish() == ()
    texts = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for delta in deltas:
        match delta:
            case TextDelta(section, piece):
                texts[section] += piece
            case ToolCallDelta(index, piece, None):
                calls[index][1] += piece
            case ToolCallDelta(_, piece, name):
                calls.append([name, piece])
    return Message(
        role="assistant",
        **texts,
        tool_calls=[ToolCall(id=f"{call_id}.{i}", name=name, arguments=piece) for i, (name, piece) in enumerate(calls)],
    )


def conversation_of(messages: list[Message]) -> Conversation:
    return Conversation(messages=messages, tools=TOOLS)


@settings(max_examples=150)
@given(
    instructions=text,
    turns=st.lists(
        st.tuples(text, text, st.sampled_from([tool.name for tool in TOOLS]), text, text), min_size=1, max_size=3
    ),
)
def test_tool_loop_grows_by_what_was_sampled(harmony, instructions, turns):
    """In a loop of calls each prompt is the last one, the ids sampled from it, and the tool's result."""
    vocabulary = harmony.vocabulary
    messages = [Message(role="system", content=instructions), Message(role="user", content="go")]
    for number, (reasoning, preamble, name, arguments, result) in enumerate(turns):
        prompt = harmony.render(conversation_of(messages))
        sampled = sample_turn(vocabulary, reasoning=reasoning, preamble=preamble, call=(name, arguments))
        reply = reply_message(harmony, conversation_of(messages), sampled, str(number))
        answer = Message(role="tool", tool_call_id=reply.tool_calls[0].id, content=result)
        messages = [*messages, reply, answer]
        expected = [*prompt, *sampled, START, *vocabulary.encode(f"functions.{name} to=assistant"), CHANNEL]
        expected += [*vocabulary.encode("commentary"), MESSAGE, *vocabulary.encode(result), END]
        assert harmony.render(conversation_of(messages)) == [*expected, START, *vocabulary.encode("assistant")]


@settings(max_examples=150)
@given(answers=st.lists(words, min_size=1, max_size=3))
def test_answers_are_stored_as_sampled_with_end_for_return(harmony, answers):
    messages = [Message(role="user", content="go")]
    for answer in answers:
        prompt = harmony.render(conversation_of(messages))
        sampled = sample_turn(harmony.vocabulary, answer=answer)
        messages = [*messages, reply_message(harmony, conversation_of(messages), sampled, "")]
        messages.append(Message(role="user", content="more"))
        following = harmony.render(conversation_of(messages))
        assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled[:-1], END]


@settings(max_examples=100)
@given(reasoning=words, answer=words)
def test_only_the_reasoning_of_an_answered_turn_is_missing(harmony, reasoning, answer):
    user = Message(role="user", content="go")
    prompt = harmony.render(conversation_of([user]))
    sampled = sample_turn(harmony.vocabulary, reasoning=reasoning, answer=answer)
    reply = reply_message(harmony, conversation_of([user]), sampled, "")
    assert (reply.reasoning, reply.content) == (reasoning, answer)
    kept = sample_message(harmony.vocabulary, "final", answer, END)
    following = harmony.render(conversation_of([user, reply, user]))
    assert following[: len(prompt) + len(kept)] == [*prompt, *kept]


def test_builtin_call(harmony):
    vocabulary = harmony.vocabulary
    arguments = {"builtin_tools": ["browser", "python"]}
    user = Message(role="user", content="go")
    conversation = Conversation(messages=[user], template_arguments=arguments)
    sampled = sample_message(vocabulary, "analysis to=browser.search code", '{"query": "x"}', CALL)
    reply = reply_message(harmony, conversation, sampled, "1")
    result = Message(role="tool", tool_call_id=reply.tool_calls[0].id, content="found")
    prompt = harmony.render(conversation)
    following = harmony.render(Conversation(messages=[user, reply, result], template_arguments=arguments))
    assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
