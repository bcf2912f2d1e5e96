"""Token masks from grammars: what may be sampled next, given what was sampled.

A leader makes one `GrammarCompiler` for its vocabulary and a `TokenGrammar` for each request that has a grammar. A mask
takes 3 to 200 us of one core for 200,000 ids, where a part of the grammar is met first up to 10 ms, and releases the
interpreter lock, so that it can be computed while the model runs: `accept` what the last step sampled, `fill_masks`
during the forward pass, apply before sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from rose_dist.errors import RoseError


class GrammarError(RoseError, ValueError):
    """A grammar that is invalid or beyond the limits of size and complexity; ends its request with an error."""


class GrammarCompiler:
    """Grammars over one vocabulary. Construction takes about half a second for 200,000 tokens."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, *, threads: int = 1):
        """
        Args:
            token_bytes: text of each id, see `rose_dist.vocabulary.load_token_bytes`; an empty one is a control token,
                which only a grammar that names its id allows.
            vocab_size: columns of the logits, ≥ len(token_bytes) + 1.
            threads: how many masks `fill_masks` computes at once.
        """
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(token_bytes, vocab_size)), n_vocab=vocab_size)
        self._executor = LLExecutor(threads)

    def compile(self, text: str) -> TokenGrammar:
        """Start a grammar, given as in `Generate.grammar`.

        Takes about a millisecond, for an extreme one up to a second, and releases the interpreter lock: not for the
        thread that steps the model.

        Raises:
            GrammarError: the grammar is invalid, or lets llguidance choose tokens, for which it would need a tokenizer.
        """
        if "no_forcing" not in text:
            raise GrammarError('the grammar must set %llguidance {"no_forcing": true}')
        return TokenGrammar(LLMatcher(self._tokenizer, text, log_level=0))

    def empty_masks(self, rows: int) -> NDArray[np.int32]:
        """All ones, int32 [rows, ceil(vocab_size / 32)]: bit i of word w of a row allows id 32 w + i."""
        masks: NDArray[np.int32] = llguidance.numpy.allocate_token_bitmask(rows, self.vocab_size)
        return masks

    def fill_masks(self, grammars: Sequence[tuple[TokenGrammar, int]], masks: NDArray[np.int32]) -> None:
        """Write each grammar's mask into the row paired with it; rows of other requests are left as they are.

        Raises:
            GrammarError: a grammar has grown too complex; the others' rows are written.
        """
        matchers = [(grammar.matcher, row) for grammar, row in grammars]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, masks)
        for grammar, _ in grammars:
            grammar.check()


class TokenGrammar:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.check()

    def accept(self, token_id: int) -> None:
        """Advance past a sampled token.

        Raises:
            GrammarError: the token is not allowed here.
        """
        self.matcher.consume_token(token_id)
        self.check()

    @property
    def finished(self) -> bool:
        """The whole grammar has been matched; nothing may follow."""
        return bool(self.matcher.is_stopped())

    def check(self) -> None:
        if self.matcher.is_error():
            raise GrammarError(self.matcher.get_error().splitlines()[0])


class _Vocabulary:
    """What llguidance's `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int):
        self.tokens = [text or b"\xff[%d]" % token_id for token_id, text in enumerate(token_bytes)]
        self.tokens += [b"\xff[%d]" % token_id for token_id in range(len(token_bytes), vocab_size)]
        self.special_token_ids = [token_id for token_id, text in enumerate(self.tokens) if text.startswith(b"\xff[")]
        # Grammars name their own stop id; what llguidance calls end of text is an id that no grammar names.
        self.eos_token_id = self.special_token_ids[-1]

    def __call__(self, text: bytes) -> list[int]:
        """Asked for only by grammars without `no_forcing`."""
        return []
