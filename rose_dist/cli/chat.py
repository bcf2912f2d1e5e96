"""`rose chat`: a conversation in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.offline import new_request, offline_session, raise_if_refused, sampling_options
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import SamplingParams
from rose_dist.frontend.formats.base import ChatFormat, Conversation, Delta, Message, TextDelta
from rose_dist.frontend.formats.choose import choose_format, load_codec


@click.command("chat")
@engine_options
@click.option("--system", default="", help="Instructions that stand before the conversation.")
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of each answer.")
@sampling_options
def command(
    options: EngineOptions,
    *,
    system: str,
    chat_template: Path | None,
    max_tokens: int,
    sampling: SamplingParams,
) -> None:
    """Talk with MODEL. Ctrl-C stops an answer, Ctrl-D or an empty line ends the conversation."""
    with offline_session(options) as session:
        if session is None:
            return
        tokenizer = load_codec(options.model)
        template = None if chat_template is None else str(chat_template)
        chat_format = choose_format("auto", tokenizer, template_path=template)
        messages = [Message(role="system", content=system)] if system else []
        while text := _read_line():
            messages.append(Message(role="user", content=text))
            messages.append(_answer(session, chat_format, messages, sampling, max_tokens))


def _read_line() -> str:
    try:
        return str(click.prompt(click.style("you", bold=True), prompt_suffix="> ", default="", show_default=False))
    except click.Abort:
        click.echo()
        return ""


def _answer(
    session: OfflineSession,
    chat_format: ChatFormat,
    messages: list[Message],
    sampling: SamplingParams,
    max_tokens: int,
) -> Message:
    """Print the answer as it is generated, and return it for the history."""
    conversation = Conversation(messages=messages)
    parser = chat_format.parser(conversation)
    request = new_request(chat_format.render(conversation), sampling, max_tokens, chat_format.stop_ids)
    sections = {"reasoning": "", "content": ""}
    tokens, begun = 0, time.monotonic()
    outputs = session.run([request])
    try:
        for output in outputs:
            raise_if_refused(output)
            tokens += len(output.token_ids)
            for token in output.token_ids:
                _show(parser.feed(token), sections)
    except KeyboardInterrupt:
        outputs.close()
    _show(parser.finish(), sections)
    click.secho(f"\n({tokens} tokens, {tokens / (time.monotonic() - begun):.1f} a second)", dim=True)
    return Message(role="assistant", content=sections["content"], reasoning=sections["reasoning"])


def _show(deltas: Sequence[Delta], sections: dict[str, str]) -> None:
    for delta in deltas:
        if isinstance(delta, TextDelta):
            sections[delta.section] += delta.text
            click.secho(delta.text, nl=False, dim=delta.section == "reasoning")
