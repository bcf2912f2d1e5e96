"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rose_dist.comm.tensor_group import TensorGroup
from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.projection import project
from rose_dist.layers.forward_batch import ForwardBatch
from rose_dist.layers.weights import Piece, Weight, copy_into, length, parameter, share


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary on each rank; a token's vector comes from the rank that holds it, by all-reduce."""

    def __init__(self, vocab_size: int, hidden: int, *, tp: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden)
        self.tp = tp
        self.part = share(vocab_size, tp.size, tp.rank)
        self.weight = parameter(length(self.part), hidden, dtype=dtype)

    def forward(self, batch: ForwardBatch, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens' vectors, [tokens, hidden], the same on every rank, and their rows of the rotary tables `cos` and
        `sin`, fp32 [positions, n].
        """
        vectors, cos, sin = embed_with_angles(
            batch.token_ids, batch.positions, self.weight, cos, sin, sampled=batch.sampled, first_id=self.part.start
        )
        self.tp.all_reduce(vectors)
        return vectors, cos, sin

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight((Piece.of(prefix + "weight", self.shape, self.part),), copy_into(self.weight))


class OutputHead(nn.Module):
    """Hidden states to logits over the whole vocabulary, gathered on the group's first rank."""

    def __init__(self, embed_tokens: VocabParallelEmbedding, *, tied: bool) -> None:
        """
        Args:
            embed_tokens: gives the shape and the split and, when `tied`, the weight itself.
        """
        super().__init__()
        self.shape, self.part, self.tp = embed_tokens.shape, embed_tokens.part, embed_tokens.tp
        self.tied = tied
        own = embed_tokens.weight
        self.weight = own if tied else parameter(*own.shape, dtype=own.dtype)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """[rows, hidden] → fp32 [rows, vocabulary] on the group's first rank, None on the others."""
        logits = project(hidden, self.weight, out_dtype=torch.float32)
        widths = [length(share(self.shape[0], self.tp.size, rank)) for rank in range(self.tp.size)]
        return self.tp.gather_columns(logits, widths)

    def weights(self, prefix: str) -> Iterator[Weight]:
        if not self.tied:
            yield Weight((Piece.of(prefix + "weight", self.shape, self.part),), copy_into(self.weight))
