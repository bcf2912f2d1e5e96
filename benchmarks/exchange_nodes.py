"""The MoE exchange over all ranks of a job: checked against a plain computation, then timed. For clusters.

    mpirun -n 16 … python -m benchmarks.exchange_nodes --tokens 1 --tokens 64
    srun --mpi=pmix … python -m benchmarks.exchange_nodes --device cpu

One rank a GPU (or, with `--device cpu`, MPI ranks). Each round has fresh random routing. A round is dispatch, a
stand-in for the experts (expert e multiplies by e % 7 + 1), and combine; ranks run free, as in a model. One exchange,
for the largest number of tokens, serves all. Rank 0 prints
one line a number of tokens, with the median and the 99th percentile over rounds of the slowest rank's time, from the
call on the host to the end on the GPU: launches and all, without graphs.
docs/infiniband.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from rose_dist.comm.all_to_all.create import create, region_bytes
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig, Routing
from rose_dist.comm.layout import Layout, even_split
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.comm.world import Groups, World


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, action="append", help="A rank; may be given several times; 1, 8, 64, 128")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=512)
    parser.add_argument("--checked", type=int, default=16, help="Rounds before those, compared bit by bit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--force-remote", type=int, help="Take every so many ranks of a host for a node of their own")
    parser.add_argument("--rail-forwarding", action="store_true", help="A row once a node; its ranks pass it on")
    parser.add_argument("--node-sums", action="store_true", help="With it: a node's results come back as one row")
    parser.add_argument("--json", action="store_true", help="One object a line")
    arguments = parser.parse_args()
    with World.join() as world:
        groups = world.groups(Layout.of(world.size), arguments.force_remote)
        sizes = arguments.tokens or [1, 8, 64, 128]
        config = AllToAllConfig(
            num_experts=arguments.experts, top_k=arguments.top_k, hidden=arguments.hidden, max_tokens=max(sizes),
            dtype=torch.bfloat16, rail_forwarding=arguments.rail_forwarding,
            partial_sums=arguments.rail_forwarding and arguments.node_sums,
        )  # fmt: skip
        device = torch.device("cpu") if arguments.device == "cpu" else torch.device("cuda", world.local_rank)
        exchange, memory = build(config, groups, device)
        for tokens in sizes:
            run(exchange, config, groups, tokens, device, arguments)
        if memory is not None:
            memory.close()


def run(
    exchange: AllToAll, config: AllToAllConfig, groups: Groups, tokens: int, device: torch.device,
    arguments: argparse.Namespace,
) -> None:  # fmt: skip
    times = []
    for number in range(arguments.checked + arguments.rounds):
        given = batch(config, tokens, groups.ep.rank, number, device)
        seconds, out = one_round(exchange, *given)
        if number < arguments.checked:
            check(given, out, nodes_of(groups, config) if config.partial_sums else None)
        else:
            times.append(seconds)
    slowest = np.max(groups.ep.all_gather_objects(times), axis=0) * 1e6
    if groups.ep.rank == 0:
        report(type(exchange).__name__, groups, tokens, slowest, arguments)


def build(config: AllToAllConfig, groups: Groups, device: torch.device) -> tuple[AllToAll, SymmetricMemory | None]:
    if device.type == "cpu":
        return create(config, groups), None
    size = region_bytes(config, groups.topology)
    memory = SymmetricMemory(groups.ep, device, size + (1 << 20), groups.topology.far)
    return create(config, groups, GpuOptions(device=device, rank=groups.ep.rank), memory=memory), memory


def batch(
    config: AllToAllConfig, tokens: int, rank: int, number: int, device: torch.device
) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(100_003 * rank + number)
    scores = torch.rand(tokens, config.num_experts, generator=generator)
    ids = scores.topk(config.top_k, 1).indices.int()
    weights = torch.rand(tokens, config.top_k, generator=generator)
    x = torch.randn(tokens, config.hidden, generator=generator).to(config.dtype)
    return x.to(device), Routing(ids.to(device), weights.to(device))


def one_round(exchange: AllToAll, x: torch.Tensor, routing: Routing) -> tuple[float, torch.Tensor]:
    """Seconds from the call to the sums, and the sums."""
    out = torch.empty_like(x)
    wait(x)
    started = time.perf_counter()
    dispatched = exchange.dispatch(x, routing)
    rows = torch.arange(dispatched.x.shape[0], device=x.device)
    expert = torch.bucketize(rows, dispatched.offsets[1:], right=True) + exchange.local_experts.start
    exchange.combine(dispatched.x * factor(expert)[:, None].to(x.dtype), dispatched, out=out)
    wait(x)
    seconds = time.perf_counter() - started
    exchange.check()
    return seconds, out


def wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def factor(expert: torch.Tensor) -> torch.Tensor:
    return (expert % 7 + 1).float()


def nodes_of(groups: Groups, config: AllToAllConfig) -> torch.Tensor:
    """The node of each expert; its rank, where there is one node."""
    topology = groups.topology
    places = range(groups.ep.size) if topology.one_domain else topology.nodes
    held = [len(even_split(config.num_experts, groups.ep.size, rank)) for rank in range(groups.ep.size)]
    return torch.tensor(places).repeat_interleave(torch.tensor(held))


def check(given: tuple[torch.Tensor, Routing], out: torch.Tensor, nodes: torch.Tensor | None) -> None:
    """Bit by bit: products in bf16 as the stand-in makes them, sums in fp32 in top-k order. nodes: of each expert, if
    their sums are rounded and then added up in the order in which a token names them.
    """
    x, routing = given
    if nodes is None:
        total = weighted(x, routing, torch.ones_like(routing.ids, dtype=torch.bool))
    else:
        total, named = torch.zeros(x.shape, device=x.device), nodes.to(x.device)[routing.ids.long()]
        for place in range(routing.ids.shape[1]):
            node = named[:, place, None]
            first = (named[:, :place] != node).all(1, keepdim=True)
            total = torch.where(first, total + weighted(x, routing, named == node).to(x.dtype).float(), total)
    if not torch.equal(total.to(x.dtype), out):
        raise AssertionError(f"{(total.to(x.dtype) != out).sum()} elements of {out.numel()} are wrong")


def weighted(x: torch.Tensor, routing: Routing, counted: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape, device=x.device)
    for place in range(routing.ids.shape[1]):
        rows = x * factor(routing.ids[:, place])[:, None].to(x.dtype)
        one = routing.weights[:, place, None] * rows.float()
        total = torch.where(counted[:, place, None], total + one, total)
    return total


def report(name: str, groups: Groups, tokens: int, times: Any, arguments: argparse.Namespace) -> None:
    figures = {
        "exchange": name, "ranks": groups.ep.size, "nodes": groups.topology.node_count, "tokens": tokens,
        "rail_forwarding": arguments.rail_forwarding, "node_sums": arguments.node_sums,
        "checked": arguments.checked, "hidden": arguments.hidden,
        "top_k": arguments.top_k, "experts": arguments.experts,
        "p50_us": round(float(np.median(times)), 1), "p99_us": round(float(np.percentile(times, 99)), 1),
    }  # fmt: skip
    line = ", ".join(f"{key} {value}" for key, value in figures.items())
    print(json.dumps(figures) if arguments.json else line, flush=True)


if __name__ == "__main__":
    main()
