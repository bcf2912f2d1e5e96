"""Every rank of the group has the same tokens: each keeps the rows of its experts, and an all-reduce ends the sum."""

from __future__ import annotations

import torch

from rose_dist.comm.all_to_all.agreement import agree
from rose_dist.comm.all_to_all.local import Local, LocalHandle
from rose_dist.comm.all_to_all.local_gpu import GpuHandle, GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.group import Group
from rose_dist.kernels.all_reduce import AllReduce


class TensorParallel(Local):
    """`Local` over `local_experts` (whole, or one slice of each), then a sum over the group in fp32, in rank order."""

    def __init__(
        self,
        config: AllToAllConfig,
        group: Group,
        local_experts: range,
        gpu: GpuOptions | None = None,
        all_reduce: AllReduce | None = None,
    ) -> None:
        """`all_reduce`: of the same group, for rows of `config.hidden` and `config.max_tokens`; needed with `gpu`."""
        agree(config, group)
        super().__init__(config, local_experts, gpu)
        self.group = group
        self.all_reduce = all_reduce
        if gpu is not None:
            if all_reduce is None:
                raise ValueError("experts spread over GPUs need an all-reduce for their sums")
            check_fits(all_reduce, config)
            all_reduce.prepare_combine(config.expert_dtype, config.top_k, config.expert_dtype, bias=gpu.late_bias)

    def reduce(self, handle: LocalHandle) -> torch.Tensor:
        total = super().reduce(handle)
        self.group.all_reduce(total)
        return total

    @property
    def packs_only(self) -> bool:
        return self.all_reduce is not None and self._packs_compactly

    def check(self) -> None:
        super().check()
        if self.all_reduce is not None:
            self.all_reduce.check()

    def reduce_on_gpu(self, handle: GpuHandle, out: torch.Tensor, accumulate: bool) -> None:
        """Few tokens: sum and all-reduce in one launch. Many: a launch each."""
        assert self.all_reduce is not None
        assert self.gpu is not None
        self.all_reduce.combine(
            handle.expert_out, handle.packed.slots, handle.routing.weights, out, tokens=handle.live,
            accumulate=accumulate, ids=handle.routing.ids, bias=handle.bias, first_expert=self.gpu.first_expert,
            live_rows=handle.live_rows,
        )  # fmt: skip
        handle.release()

    def reduce_norm_on_gpu(
        self, handle: GpuHandle, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert self.all_reduce is not None
        return self.all_reduce.combine_norm(
            handle.expert_out, handle.packed.slots, handle.routing.weights, residual, norm_weight, eps,
            live_rows=handle.live_rows,
        )  # fmt: skip


def check_fits(all_reduce: AllReduce, config: AllToAllConfig) -> None:
    """Raise `ValueError` if the all-reduce can't take the all-to-all's results."""
    if all_reduce.sizes.hidden != config.hidden or all_reduce.sizes.max_rows < config.max_tokens:
        raise ValueError(f"the all-reduce is for {all_reduce.sizes}, which does not fit {config}")
