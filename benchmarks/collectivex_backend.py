"""Adapter with which CollectiveX, a neutral benchmark of expert-parallel exchanges
(InferenceX/experimental/CollectiveX), can run this library.

CollectiveX's folder `bench` must be on PYTHONPATH; its `run_ep.py` takes a backend by name from a table, to which
`rose` has to be added:

    from benchmarks.collectivex_backend import RoseBackend

It delivers a row for every pair of token and expert and applies the weights itself, which CollectiveX calls receive
layout `token-expert` with `weighted-kernel-sum` and allows in mode `low-latency` alone. With `--precision fp8` dispatch
quantises rows as it sends them; results come back in bf16. Written against the interface of 2026-08; it has run on CPU
ranks only (tests/comm/test_collectivex_backend.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ep_backend import EPBackend  # type: ignore[import-not-found]  # CollectiveX's

from rose_dist.comm.all_to_all.create import region_bytes
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.nvlink import NvLink
from rose_dist.comm.all_to_all.peer_to_peer import PeerToPeer
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Routing
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.comm.topology import Topology
from rose_dist.comm.world import machine_id
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.quantize import dequantize, quantize

_SLACK = 1 << 20


class RoseBackend(EPBackend):  # type: ignore[misc]  # a class of CollectiveX's
    name = "rose"
    maturity = "candidate"
    SUPPORTED_MODES = ("low-latency",)
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    requires_fresh_pair = True
    receive_layout = "token-expert"
    combine_weight_semantics = "weighted-kernel-sum"
    memory: SymmetricMemory | None = None

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        self.fp8 = self.precision == "fp8"
        if self.fp8:
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes, self.dispatch_scale_bytes_per_copy = 1, 4 * FP8.blocks(args.hidden)
            self.stage_device_work = True

    @property
    def topology(self) -> Topology:
        return Topology.of(TorchRanks().all_gather_objects(machine_id()), self.rank)

    def create_buffer(self, spec: Any) -> None:
        config = AllToAllConfig(
            num_experts=self.args.experts,
            top_k=self.args.topk,
            hidden=self.args.hidden,
            max_tokens=spec.max_tokens_per_rank,
            dtype=torch.bfloat16,
        )
        self.exchange = self.build(config.in_format(FP8) if self.fp8 else config)

    def build(self, config: AllToAllConfig) -> AllToAll:
        ranks, device, topology = TorchRanks(), torch.device("cuda", self.local_rank), self.topology
        size = region_bytes(config, topology)
        self.memory = SymmetricMemory(ranks, device, size + _SLACK, topology.far)
        options = GpuOptions(device=device, rank=ranks.rank)
        sms = min(ranks.all_gather_objects(torch.cuda.get_device_properties(device).multi_processor_count))
        if topology.one_domain:
            return NvLink(config, ranks, options, self.memory.take, sms)
        return PeerToPeer(config, ranks, topology, options, self.memory.take, sms)

    def dispatch(self, problem: Any) -> SimpleNamespace:
        routing = Routing(problem.topk_idx, problem.topk_weights)
        return SimpleNamespace(dispatched=self.exchange.dispatch(problem.dispatch_x, routing), combine_input=None)

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """What rows are after the way there."""
        return dequantize(*quantize(x, FP8), FP8) if self.fp8 else x

    def received(self, handle: Any) -> torch.Tensor:
        """bf16 [rows, hidden], rows that were not received among them."""
        dispatched = handle.dispatched
        return dequantize(dispatched.x, dispatched.scales, FP8) if self.fp8 else dispatched.x

    def stage(self, problem: Any, handle: Any) -> None:
        handle.combine_input = self.received(handle)

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        out = torch.empty_like(problem.dispatch_x)
        self.exchange.combine(handle.combine_input, handle.dispatched, out=out)
        return out

    def recv_tokens(self, handle: Any) -> int:
        return int(handle.dispatched.counts.sum())

    def inspect_dispatch(self, problem: Any, handle: Any) -> SimpleNamespace:
        """The rows received, and the expert that each is for."""
        dispatched, first = handle.dispatched, self.exchange.local_experts.start
        counts = dispatched.counts.long()
        experts = torch.arange(len(counts), device=counts.device) + first
        return SimpleNamespace(
            payload=self.received(handle)[: int(counts.sum())],
            expert_ids=experts.repeat_interleave(counts),
            local_expert_counts=counts,
        )

    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor:
        handle.combine_input = torch.zeros_like(handle.dispatched.x, dtype=torch.bfloat16)
        handle.combine_input[: transformed.shape[0]] = transformed
        return self.combine(problem, handle)

    def finalize(self, rc: int) -> int:
        if self.memory is not None:
            self.memory.close()
        return int(super().finalize(rc))

    def _topk_idx_dtype(self) -> torch.dtype:
        return torch.int32


class TorchRanks:
    """What the exchange needs of a group, over torch.distributed's world."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
