"""Grammars, compiled by threads of their own while the engine steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rose_dist.engine.grammar import GrammarCompiler, TokenGrammar
from rose_dist.engine.request import Request
from rose_dist.errors import RoseError

_THREADS = 2
"""So that a grammar that takes half a second does not hold up all others."""


class CompileWorker:
    """Requests wait here for their grammars; `fileno` is readable when there may be something to `take`."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        """
        Args:
            make_compiler: called for the first grammar, or by `prepare`.
        """
        self._make_compiler = make_compiler
        self._threads = ThreadPoolExecutor(_THREADS, "grammar-compile")
        self._compiler: Future[GrammarCompiler] | None = None
        self._compiling: dict[Request, Future[TokenGrammar]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def prepare(self) -> Future[GrammarCompiler]:
        """Make the compiler, which holds the interpreter lock: better at the start than while requests run."""
        if self._compiler is None:
            self._compiler = self._threads.submit(self._make_compiler)
        return self._compiler

    def start(self, request: Request, grammar: str) -> None:
        """Begin to compile what `request` waits for."""
        compiler = self.prepare()
        future = self._threads.submit(lambda: compiler.result().compile(grammar))
        self._compiling[request] = future
        future.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def forget(self, request: Request) -> None:
        """The request is no longer there, or never waited here."""
        future = self._compiling.pop(request, None)
        if future is not None:
            future.cancel()

    def take(self, *, wait: bool = False) -> list[tuple[Request, TokenGrammar | RoseError]]:
        """What has become of requests since the last call, in their order: the grammar, or why there is none.

        Args:
            wait: until all are compiled.
        """
        if self._compiler is None:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        ended = [request for request, future in self._compiling.items() if wait or future.done()]
        return [(request, _result(self._compiling.pop(request))) for request in ended]


def _result(future: Future[TokenGrammar]) -> TokenGrammar | RoseError:
    try:
        return future.result()
    except RoseError as error:  # a GrammarError, or a VocabularyError of the compiler's construction
        return error
