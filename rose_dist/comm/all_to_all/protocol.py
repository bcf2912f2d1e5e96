"""What every MoE all-to-all promises: rows go to the ranks that hold their experts and come back as a weighted sum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from rose_dist.kernels.expert_slots import COMPACT, PackedLayout
from rose_dist.kernels.formats import BlockFormat, Element
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.row_groups import GroupedRows


@dataclass(frozen=True, kw_only=True)
class AllToAllConfig:
    """Every size that an all-to-all is built from. All ranks of a group must give the same."""

    num_experts: int
    top_k: int
    """Experts a token, 1 to 32."""
    hidden: int
    """Elements a row. Implementations on GPUs need rows of a multiple of 16 bytes."""
    max_tokens: int
    """Most tokens that one `dispatch` may be given on one rank."""
    dtype: torch.dtype = torch.float32
    """Of the rows dispatched."""
    out_dtype: torch.dtype | None = None
    """Of the experts' output rows; None: as `dtype`."""
    scale_dim: int = 0
    """Scales a row that travel along; 0: none."""
    scale_dtype: torch.dtype = torch.float32
    quantized: BlockFormat | None = None
    """Rows are given in bf16 without scales, and dispatch makes codes and scales of them in this format; the three
    fields above must be its own, as `in_format` sets them."""
    partial_sums: bool = False
    """Where rows travel, each rank adds up its own experts' results of a token and sends one row back, rounded to
    `expert_dtype`; `combine` says in which order. Fewer bytes, and one rounding more a rank."""
    rail_forwarding: bool = False
    """Between nodes, a row goes once to each node that it is for, to the rank on the sender's rail, which passes it on
    to the ranks there. Results come back from each of them; with `partial_sums`, which between nodes need this, each
    node, not each rank, adds up its experts' results of a token and sends one row back, on the same way. All nodes must
    have equally many ranks."""

    def in_format(self, quantized: BlockFormat) -> AllToAllConfig:
        """The same with rows that dispatch quantises. Results keep their dtype."""
        return replace(
            self, quantized=quantized, dtype=quantized.codes_dtype(), scale_dim=quantized.blocks(self.hidden),
            scale_dtype=quantized.scale.value, out_dtype=self.expert_dtype,
        )  # fmt: skip

    @property
    def given_dtype(self) -> torch.dtype:
        """Of the rows that dispatch is given."""
        return self.dtype if self.quantized is None else torch.bfloat16

    @property
    def given_scales(self) -> int:
        """Scales a row that dispatch is given."""
        return self.scale_dim if self.quantized is None else 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= 32:
            raise ValueError(f"top_k is 1 to 32, got {self.top_k}")
        for name in ("num_experts", "hidden", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.scale_dim < 0:
            raise ValueError(f"scale_dim is at least 0, got {self.scale_dim}")
        if self.quantized is not None:
            fmt = self.quantized
            if fmt.element is not Element.E4M3 or self.hidden % 16:
                raise ValueError(f"dispatch quantises rows of a multiple of 16 to e4m3, not {self.hidden} to {fmt}")
            wanted = (fmt.codes_dtype(), fmt.blocks(self.hidden), fmt.scale.value)
            if (self.dtype, self.scale_dim, self.scale_dtype) != wanted:
                raise ValueError(f"dtype, scale_dim and scale_dtype of {fmt} rows are {wanted}: use in_format")

    @property
    def expert_dtype(self) -> torch.dtype:
        """Of the experts' output rows."""
        return self.out_dtype or self.dtype


@dataclass(frozen=True)
class Routing:
    """Where each token goes. An id may appear twice in a row: both weights count. The tensors must stay unchanged until
    `combine` is done.
    """

    ids: torch.Tensor
    """[tokens, top_k] int32, expert ids; −1: skip, whatever the weight is."""
    weights: torch.Tensor
    """[tokens, top_k] fp32."""


class Handle:
    """The record of one dispatch: it owns the routing that `combine` uses, so another can't be given.

    Implementations extend it. It goes through the halves in order, once each.
    """

    _HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")

    def __init__(self, owner: AllToAll, routing: Routing, tokens: int, live: int) -> None:
        self.owner = owner
        self.routing = routing
        self.tokens = tokens
        """Rows of the `x` given, and of the `out` that `combine` takes."""
        self.live = live
        """Rows up to the bound."""
        self._done = 1

    def enter(self, owner: AllToAll, half: str) -> None:
        """Check that `half` is `owner`'s next step; raises `RuntimeError` otherwise."""
        if self.owner is not owner:
            raise RuntimeError(f"{half} was given a handle of another all-to-all")
        due = self._HALVES[self._done] if self._done < len(self._HALVES) else "nothing: it is combined"
        if half != due:
            raise RuntimeError(f"{half} is out of turn for this dispatch, due is {due}")
        self._done += 1


@dataclass(frozen=True)
class Dispatched:
    """The rows for this rank's experts. Local expert e has rows `offsets[e]` to `offsets[e] + counts[e]`, in the order
    of the ranks they came from, then of their tokens, then of their place in the top k.
    """

    x: torch.Tensor
    """[rows, hidden] as dispatched. It may hold padding rows between experts and, on a GPU, behind the last one: rows
    is then what the tokens could fill at most. Their values are any.
    """
    scales: torch.Tensor | None
    """[rows, scale_dim], or None if the construction has none. On a GPU perhaps by columns: `PackedRows.scales`."""
    counts: torch.Tensor
    """[local_experts] int32, rows of each local expert."""
    offsets: torch.Tensor
    """[local_experts + 1] int64, where each expert's rows start; the last is the number of rows."""
    handle: Handle
    layout: PackedLayout = COMPACT
    """How the rows are packed."""
    slots: torch.Tensor | None = None
    """Where all tokens are this GPU's: int32 [tokens, top_k], the row of each pair, −1 if its expert is not here. For
    tokens from the bound on they are any, and `handle.routing.ids` should be −1.
    """
    groups: GroupedRows | None = None
    """Where the construction says so, the rows; `x` is then but their memory."""


class AllToAll(Protocol):
    """Dispatch and combine; one object serves all layers of a model. All ranks of the group make the same calls in the
    same order, from one thread; a rank without tokens gives `x` of shape [0, hidden]. Several dispatches may be in
    flight.

    Every rank of a TP group gives the same tokens and gets all their results.
    """

    config: AllToAllConfig
    local_experts: range
    """Ids of the experts that this rank holds (or holds a slice of)."""
    rows_sent: int
    """Rows that this rank has dispatched to experts of other ranks since construction."""

    def dispatch(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> Dispatched:
        """Send each row of `x` to the experts that `routing` names, and receive the rows for this rank's experts.

        `x` is [tokens, hidden] of `config.given_dtype`, `scales` [tokens, given_scales]. `rows` bounds the live rows
        (an int, or a tensor of one element): rows beyond it are neither sent nor written by `combine`.

        Raises `ValueError` for more tokens than `config.max_tokens`, for other shapes or dtypes than the
        construction's, and for ids outside −1 … num_experts − 1. On a GPU, `rows` as a tensor is int32 there, it is not
        checked, and ids outside that range are skipped: nothing is read on the host.
        """
        return self.dispatch_recv(self.dispatch_send(x, routing, scales=scales, rows=rows))

    def combine(
        self, expert_out: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Bring the experts' results back: out[t] = Σ_j weights[t, j] · (expert_out of (t, ids[t, j]) + bias of it).

        `expert_out` is [rows, hidden] of `config.expert_dtype`, in the order of `dispatched.x`; `out` is [tokens,
        hidden] of any floating dtype. Products and the sum are rounded to fp32, in top-k order, and rounded to
        `out`'s dtype at the end, so that the bits are the same from run to run and with every implementation; only
        `TensorParallel` sums each rank's experts first, then over ranks in rank order. With `config.partial_sums`,
        where rows travel, every rank (the token's own too) does this for its own experts' places and rounds its sum to
        `config.expert_dtype`; these are added in fp32, in the order in which the ranks first appear in the token's top
        k. So a token's bits depend on its routing and on which rank holds which expert, not on its batch. With
        `accumulate`, `out`'s old value is added to the sum before that rounding. A token without experts gives zeros.
        `bias` is [local experts, hidden] of `config.expert_dtype`; the sum with it is rounded to fp32, or where rows
        travel to `config.expert_dtype`.

        Raises `RuntimeError` if `dispatched` was combined before or is another all-to-all's, and `ValueError` for other
        shapes.
        """
        self.combine_send(with_bias(expert_out, dispatched, bias), dispatched)
        self.combine_recv(dispatched, out=out, accumulate=accumulate)

    @property
    def packs_only(self) -> bool:
        """Whether dispatch does nothing but pack rows on this GPU, and `combine_norm` serves.

        A model may then use `dispatch_packed`, with a kernel that does other work in the same launch, and
        `combine_norm`. For up to `linear_add.MAX_ROWS` tokens.
        """
        return False

    def dispatch_packed(self, tokens: int, pack: Callable[[PackedRows], Routing]) -> Dispatched:
        """`dispatch` where `packs_only`: `pack` fills the rows of so many tokens, all slots among them, and says how
        they are routed.
        """
        raise RuntimeError(f"{type(self).__name__} does more than to pack rows")

    def combine_norm(
        self, expert_out: torch.Tensor, dispatched: Dispatched, residual: torch.Tensor, norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:  # fmt: skip
        """`combine` where `packs_only`, added to `residual` [tokens, hidden] in place, and that normalised, as
        `kernels.combine_norm` does it.
        """
        raise RuntimeError(f"{type(self).__name__} does more than to add up rows")

    @property
    def holds_all(self) -> bool:
        """Whether `packs_only`, and all experts' results are on this GPU: `results` then may be used in place of
        `combine_norm`, by a launch that sums them and does other work.
        """
        return False

    def results(self, expert_out: torch.Tensor, dispatched: Dispatched) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and weights of the rows of `expert_out` where it `holds_all`, as `kernels.combine_norm` takes them:
        for a launch before the next dispatch's.
        """
        raise RuntimeError(f"{type(self).__name__} does more than to add up rows")

    def check(self) -> None:
        """Raise `WaitExpiredError` if a kernel on a GPU has waited in vain; to be called once a step, after it."""
        return None

    @abstractmethod
    def dispatch_send(
        self,
        x: torch.Tensor,
        routing: Routing,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | int | None = None,
    ) -> Handle:
        """The first half of `dispatch`. Work that needs no result may run before `dispatch_recv`."""
        ...

    @abstractmethod
    def dispatch_recv(self, handle: Handle) -> Dispatched:
        """The second half of `dispatch`; to be called in the order of the sends."""
        ...

    @abstractmethod
    def combine_send(self, expert_out: torch.Tensor, dispatched: Dispatched) -> None:
        """The first half of `combine`."""
        ...

    @abstractmethod
    def combine_recv(self, dispatched: Dispatched, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """The second half of `combine`."""
        ...


def with_bias(expert_out: torch.Tensor, dispatched: Dispatched, bias: torch.Tensor | None) -> torch.Tensor:
    """Each row plus its expert's row of `bias`, if there is one; rows of no expert are any. The host reads nothing."""
    if bias is None or not bias.shape[0]:
        return expert_out
    every = torch.arange(expert_out.shape[0], device=expert_out.device)
    experts = torch.searchsorted(dispatched.offsets[1:], every, right=True).clamp_(max=bias.shape[0] - 1)
    return expert_out + bias[experts]
