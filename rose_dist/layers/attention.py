"""Grouped-query attention with sinks, split over the tensor-parallel ranks by heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rose_dist.comm.tensor_group import TensorGroup
from rose_dist.kernels.combine_rotary import Unsummed, combine_rotary
from rose_dist.kernels.combine_rotary import takes as takes_unsummed
from rose_dist.kernels.linear_add import fits, linear_add
from rose_dist.kernels.linear_rotary import takes
from rose_dist.kernels.projection import project_heads
from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.layers.forward_batch import GroupBatch
from rose_dist.layers.linear import Linear, PackedLinear
from rose_dist.layers.weights import Piece, Weight, copy_into, parameter


@dataclass(frozen=True)
class HeadShare:
    """The heads that one tensor-parallel rank computes.

    With more ranks than key heads, neighbouring ranks hold copies of one key head.
    """

    query_heads: int
    key_heads: int
    head_dim: int
    tp_size: int
    tp_rank: int

    @property
    def queries(self) -> slice:
        """This rank's rows of q_proj, and columns of o_proj."""
        size = self.query_heads // self.tp_size * self.head_dim
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    @property
    def keys(self) -> slice:
        """This rank's rows of k_proj and of v_proj."""
        size = self.local_key_heads * self.head_dim
        start = self.tp_rank * self.key_heads // self.tp_size * self.head_dim
        return slice(start, start + size)

    @property
    def sinks(self) -> slice:
        size = self.query_heads // self.tp_size
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    @property
    def local_key_heads(self) -> int:
        return max(1, self.key_heads // self.tp_size)

    @staticmethod
    def allowed_tp(query_heads: int, key_heads: int) -> list[int]:
        """Tensor-parallel sizes that split whole heads evenly."""
        return [
            tp
            for tp in range(1, query_heads + 1)
            if query_heads % tp == 0 and (key_heads % tp == 0 or tp % key_heads == 0)
        ]


class Attention(nn.Module):
    """The whole block: q, k and v projections, rotary, cache write, attention, output projection."""

    def __init__(self, hidden: int, heads: HeadShare, *, tp: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.tp = tp
        whole_queries, whole_keys = heads.query_heads * heads.head_dim, heads.key_heads * heads.head_dim
        self.qkv_proj = PackedLinear(
            hidden,
            {
                "q_proj": (whole_queries, heads.queries),
                "k_proj": (whole_keys, heads.keys),
                "v_proj": (whole_keys, heads.keys),
            },
            dtype=dtype,
            bias=True,
        )
        self.o_proj = Linear(whole_queries, hidden, dtype=dtype, columns=heads.queries, adds_bias=tp.rank == 0)
        self.sinks = parameter(heads.query_heads // heads.tp_size, dtype=torch.float32)
        self.scale = heads.head_dim**-0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, batch: GroupBatch) -> Tensor:
        """
        Args:
            x: [tokens, hidden], normalised.
            cos, sin: fp32 [tokens, head_dim / 2].
            layer: this layer's place in its KV group.

        Returns:
            [tokens, hidden], summed over the tensor-parallel group.
        """
        qkv, cache = self.qkv_proj, batch.storage.layer(layer, batch.slots)
        assert qkv.bias is not None
        q = project_heads(x, qkv.weight, qkv.bias, self.heads.local_key_heads, cos, sin, cache)
        out: Tensor = self.o_proj(self._attend(q, cache, batch))
        self.tp.all_reduce(out)
        return out

    def takes_few(self, cache_dtype: torch.dtype) -> bool:
        """Whether `add_few` serves this block on a GPU."""
        return fits(self.o_proj.weight) and takes(self.qkv_proj.weight, self.heads.head_dim, cache_dtype)

    def takes_unsummed(self, tokens: int, top_k: int) -> bool:
        """Whether `add_few`, which serves this block, takes so many tokens as `Unsummed`, each with k experts."""
        return takes_unsummed(tokens, self.qkv_proj.weight, top_k)

    def add_few(
        self, x: Tensor | Unsummed, residual: Tensor, cos: Tensor, sin: Tensor, layer: int, batch: GroupBatch
    ) -> Tensor:
        """`residual` plus what `forward` gives, of up to `MAX_ROWS` tokens, in two launches besides attention's,
        or three where the all-reduce doesn't take the product (`GpuGroup.add_linear`); `residual` itself may hold it.

        x: normalised, or what is still to be added to `residual` and normalised.
        """
        qkv, cache = self.qkv_proj, batch.storage.layer(layer, batch.slots)
        assert qkv.bias is not None
        arguments = (qkv.weight, qkv.bias, self.heads.local_key_heads, cos, sin, cache)
        if isinstance(x, Unsummed):
            q, residual = combine_rotary(x, *arguments)
        else:
            q = project_heads(x, *arguments)
        attended = self._attend(q, cache, batch)
        if self.tp.size == 1:
            return linear_add(attended, self.o_proj.weight, self.o_proj.bias, residual)
        self.tp.add_linear(attended, self.o_proj.weight, self.o_proj.bias, residual)
        return residual

    def _attend(self, q: Tensor, cache: PagedCache, batch: GroupBatch) -> Tensor:
        """[tokens, heads · head_dim], of this rank's heads."""
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for work in batch.work:
            work.attend(q, cache.keys, cache.values, self.sinks, self.scale, attended)
        return attended.flatten(1)

    def weights(self, prefix: str) -> Iterator[Weight]:
        heads = self.heads
        yield Weight((Piece.of(prefix + "sinks", (heads.query_heads,), heads.sinks),), copy_into(self.sinks))
