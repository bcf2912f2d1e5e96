"""Dispatch and combine beside FlashInfer's MoeAlltoAll (flashinfer-python 0.7), in one run on the GPUs of one host.

    python -m benchmarks.exchange_flashinfer --ranks 2 [--out FOLDER] [--limit 50] [--models gpt-oss]
        [--tokens 128,4096]

FlashInfer's kernels are compiled by nvcc while ours are; `python -m benchmarks.flashinfer_modules MoeAlltoAll` does so
beforehand. Everything ends after `--limit` seconds; what was timed by then is kept, and what went wrong is said. Times
are medians of CUDA graph replays in microseconds, of the slowest rank.

FlashInfer sends rows, ids and weights to each rank that has an expert of the token, and does not order them by expert;
combine adds up one row a rank, which the experts' kernels are to leave in its workspace, so that is what ours is timed
for (`AllToAllConfig.partial_sums`), ordering, weighting and adding up within the rank included. `FlashInfer, ordered`
does all that too, by our kernels for one GPU around its two; of bf16 rows, from 64 tokens on.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange import chosen, write
from benchmarks.exchange_layers import BF16, Inputs, Model
from benchmarks.exchange_sections import PARTIAL, TOKENS, Rank, build_kernels
from benchmarks.flashinfer_modules import Builds
from benchmarks.gpu_ranks import NO_MULTICAST
from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import Routing
from rose_dist.kernels.arch import device_info

ORDERED_TOKENS = 64
START_SECONDS = 22.0
"""Of the limit, that the ranks need to start and to measure something."""


class FlashInfer:
    """Its exchange of one model, for up to `most` tokens a rank."""

    def __init__(self, model: Model, most: int, one: Rank) -> None:
        from flashinfer.comm.comm_backend import TorchDistBackend  # noqa: PLC0415
        from flashinfer.comm.mapping import Mapping  # noqa: PLC0415
        from flashinfer.comm.mnnvl import MnnvlConfig  # noqa: PLC0415
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll  # noqa: PLC0415

        class Whole(TorchDistBackend):
            """All ranks over the CPU's group. Its own split makes a group of NCCL's, even if that is all ranks."""

            def Split(self, color: int, key: int) -> Whole:  # noqa: N802  FlashInfer's name
                return self

        mapping = Mapping(
            world_size=one.ranks, rank=one.rank, gpus_per_node=one.ranks, tp_size=one.ranks, moe_ep_size=one.ranks
        )
        self.model, self.ranks, self.most, self.one = model, one.ranks, most, one
        self.exchange = MoeAlltoAll(
            mapping, most, model.top_k, model.experts, hidden_size=model.hidden,
            mnnvl_config=MnnvlConfig(comm_backend=Whole(one.control.cpu)),
        )  # fmt: skip

    @functools.cached_property
    def local(self) -> Local:
        """For what this rank receives."""
        ranks, experts = self.ranks, self.model.experts // self.ranks
        mine = range(self.one.rank * experts, (self.one.rank + 1) * experts)
        return Local(self.model.config(ranks * self.most), mine, GpuOptions(device=self.one.device))

    def pair(
        self, inputs: Inputs, tokens: int, experts: Callable[[torch.Tensor, list[torch.Tensor]], Any] | None = None
    ) -> Callable[[], Any]:
        """Dispatch, then combine of what stands in the workspace, or of what `experts` leave there."""
        scales = [] if inputs.scales is None else [inputs.scales]
        payloads = [inputs.x.view(torch.uint8), *scales, inputs.ids, inputs.weights]
        out = torch.empty(tokens, self.model.hidden, dtype=BF16, device=inputs.x.device)

        def call() -> Any:
            received = self.exchange.dispatch(inputs.ids, payloads, tokens)
            results = self.exchange.get_combine_payload_tensor_in_workspace(tokens, self.model.hidden, BF16)
            if experts is not None:
                experts(results, received)
            return self.exchange.combine(results, tokens, payload_in_workspace=True, output=out)

        return call

    def ordered(self, inputs: Inputs, tokens: int) -> Callable[[], torch.Tensor]:
        """The pair of bf16 rows, which are ordered by expert in between, and weighted and added up within the rank."""
        payloads = [inputs.x.view(torch.uint8), inputs.ids, inputs.weights]
        hidden, out = self.model.hidden, torch.empty_like(inputs.x)

        def call() -> torch.Tensor:
            x, ids, weights = self.exchange.dispatch(inputs.ids, payloads, tokens, -1, 1)
            routing = Routing(ids.view(-1, self.model.top_k), weights.view(-1, self.model.top_k))
            dispatched = self.local.dispatch(x.view(-1, 2 * hidden).view(BF16), routing)
            results = self.exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, BF16)
            self.local.combine(dispatched.x, dispatched, out=results.view(-1, hidden))
            self.exchange.combine(results, tokens, payload_in_workspace=True, output=out)
            return out

        expected = inputs.x.float() * inputs.weights.sum(1, keepdim=True)
        if not torch.allclose(call().float(), expected, rtol=0.03, atol=0.01):
            raise RuntimeError(f"FlashInfer, ordered: wrong sums of {tokens} tokens")
        return call

    def wrong(self, inputs: Inputs, tokens: int) -> str:
        """With experts that give their rows back: a token's row times its ranks, which is exact for powers of two."""
        call = self.pair(inputs, tokens, lambda results, received: results.copy_(received[0].view(BF16)))
        owners = inputs.ids // (self.model.experts // self.ranks)
        ranks = torch.stack([(owners == rank).any(1) for rank in range(self.ranks)]).sum(0)
        expected = inputs.x.float() * ranks[:, None]
        far = ((call().float() - expected).abs() > 0.01 * expected.abs()).sum()
        return f"{far} elements are wrong" if far else ""


def lines(one: Rank, model: Model) -> Iterator[dict[str, Any]]:
    sizes = one.sizes(TOKENS)
    theirs, ours = FlashInfer(model, max(sizes), one), one.layer(model, "flashinfer", PARTIAL)
    for tokens in sizes:
        inputs = Inputs.of(model, tokens, one.rank, 0, one.device, whole=True)
        calls = 20 if tokens <= 256 else 4
        result = "not checked" if model.fp8 else theirs.wrong(inputs, tokens) or "right"
        line: dict[str, Any] = {
            "model": model.name, "tokens": tokens, "FlashInfer": result,
            "FlashInfer pair us": one.time(theirs.pair(inputs, tokens), calls),
            "ours pair us": one.time(ours.resized(tokens).exchange, calls),
        }  # fmt: skip
        if tokens >= ORDERED_TOKENS and not model.fp8:
            line["FlashInfer, ordered us"] = one.time(theirs.ordered(inputs, tokens), calls)
        one.say(line)
        yield line
    ours.moe.check()


def work(rank: int, arguments: argparse.Namespace, answers: Any) -> None:
    """A rank's process."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=arguments.limit)
    dist.init_process_group("nccl", rank=rank, world_size=arguments.ranks, device_id=device, timeout=limit)
    one = Rank(device, chosen(arguments), tuple(int(size) for size in arguments.tokens.split(",") if size))
    for model in one.models:
        if not model.fused:
            try:
                for line in lines(one, model):
                    if rank == 0:
                        answers.put(line)
            except Exception:
                answers.put(f"FAILED on rank {rank}: {traceback.format_exc(limit=-2)}")
                break
    time.sleep(1.0)  # the queue's pipe
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/flashinfer"))
    parser.add_argument("--limit", type=float, default=50.0, help="seconds, compilation included")
    parser.add_argument("--models", default="gpt-oss,deepseek", help="parts of names")
    parser.add_argument("--tokens", default="", help="numbers")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    builds, start = Builds(["MoeAlltoAll"]), time.monotonic()
    models = [model for model in chosen(arguments) if not model.fused]
    build_kernels(device_info(0).arch, ["flashinfer"], models, arguments.ranks)
    if problem := builds.wait(arguments.limit - START_SECONDS)["MoeAlltoAll"]:
        sys.exit(f"FlashInfer's MoeAlltoAll: {problem}")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    results |= {"compiled in s": round(time.monotonic() - start, 1), "pairs": []}
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    os.environ.update(NO_MULTICAST)
    processes = [context.Process(target=work, args=(rank, arguments, answers)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    while time.monotonic() < deadline and (any(one.is_alive() for one in processes) or not answers.empty()):
        if not answers.empty():
            answer = answers.get()
            if isinstance(answer, str):
                results["failed"] = answer
                deadline = min(deadline, time.monotonic() + 1.0)  # the other ranks may wait for this one for good
            else:
                results["pairs"].append(answer)
        time.sleep(0.05)
    if late := [one for one in processes if one.is_alive()]:
        results.setdefault("ended", "not all was measured within the limit")
        for one in late:
            one.kill()
    write(results, arguments.out, arguments.ranks)
    print((arguments.out / f"exchange_{arguments.ranks}.md").read_text())


if __name__ == "__main__":
    main()
