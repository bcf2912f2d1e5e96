"""`rose generate`: prompts in, text out."""

from __future__ import annotations

import sys

import click

from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.offline import new_request, offline_session, raise_if_refused, sampling_options
from rose_dist.engine.protocol import SamplingParams
from rose_dist.frontend.formats.choose import load_codec
from rose_dist.frontend.tokenizer import Detokenizer, TextCodec


@click.command("generate")
@engine_options
@click.argument("prompts", nargs=-1)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@sampling_options
def command(options: EngineOptions, *, prompts: tuple[str, ...], max_tokens: int, sampling: SamplingParams) -> None:
    """Continue each of PROMPTS with MODEL; without any, what comes on standard input.

    One prompt's text appears as it is generated; several are generated together and printed in their order.
    """
    texts = prompts or (sys.stdin.read(),)
    with offline_session(options) as session:
        if session is None:
            return
        tokenizer = load_codec(options.model)
        requests = [
            new_request(tokenizer.encode(text, add_special_tokens=True), sampling, max_tokens, tokenizer.eos_ids)
            for text in texts
        ]
        printer = _Printer([request.request_id for request in requests], tokenizer)
        for output in session.run(requests):
            raise_if_refused(output)
            printer.take(output.request_id, output.token_ids, finished=output.finish is not None)


class _Printer:
    """Prints the first unfinished text as it grows, the others once their turn comes."""

    def __init__(self, request_ids: list[str], tokenizer: TextCodec) -> None:
        self._queue = request_ids
        self._detokenizers: dict[str, Detokenizer] = {request: tokenizer.detokenizer() for request in request_ids}
        self._held = dict.fromkeys(request_ids, "")
        self._finished: set[str] = set()

    def take(self, request_id: str, token_ids: list[int], *, finished: bool) -> None:
        detokenizer = self._detokenizers[request_id]
        self._held[request_id] += "".join(map(detokenizer.feed, token_ids))
        if finished:
            self._held[request_id] += detokenizer.finish() + "\n"
            self._finished.add(request_id)
        while self._queue:
            first = self._queue[0]
            click.echo(self._held.pop(first), nl=False)
            self._held[first] = ""
            if first not in self._finished:
                break
            self._queue.pop(0)
