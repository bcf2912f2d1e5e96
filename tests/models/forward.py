"""Runs on ranks: the logits of every position of some prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.kv_cache import KVCache
from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.engine.request import Request
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.layers.expert_matrices import MoeWeights
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.loader import load_model


def all_logits(
    world: World, folder: Path, sizes: dict[str, int], prompts: list[list[int]], chunk: int, kind: MoeWeights = "bf16"
) -> dict[int, npt.NDArray[np.float32]] | None:
    """fp32 [tokens, vocabulary] by prompt, on leaders; None on other ranks.

    Replica n leaves out the first n prompts, so that the replicas' steps differ in size, and some are empty.
    """
    layout = Layout.of(world.size, **sizes)
    groups = world.groups(layout)
    config = EngineConfig(folder, kv_tokens=8192, max_step_tokens=chunk, max_running=1, prefix_cache=False)
    model = load_model(folder, BuildOptions(groups, chunk, moe_weights=kind))
    runner = ModelRunner(model, config)
    steps = sum(-(-len(prompt) // chunk) for prompt in prompts)
    order = range(min(groups.place.dp_rank, len(prompts)), len(prompts))
    found: dict[int, list[torch.Tensor]] = {i: [] for i in order}
    done = 0
    for i in order:
        request = Request(b"", Generate(request_id="", prompt=prompts[i], sampling=SamplingParams()), 8192, 0, [])
        kv = KVCache(runner.specs, config.block_size, prefix_cache=False)
        request.tables = kv.empty_tables()
        for start in range(0, len(prompts[i]), chunk):
            end = min(start + chunk, len(prompts[i]))
            assert kv.grow(request, end)
            tables = [(table.first, list(table.blocks)) for table in request.tables]
            step = Step([SequenceStep(prompts[i][start:end], start, tables, True)])
            logits = _forward(runner, step)
            kv.advance(request, end)
            done += 1
            if logits is not None:
                found[i].append(logits)
    for _ in range(done, steps):
        _forward(runner, Step())
    groups.free()
    return {i: torch.cat(logits).numpy() for i, logits in found.items()} if groups.tp.rank == 0 else None


@torch.inference_mode()
def _forward(runner: ModelRunner, step: Step) -> torch.Tensor | None:
    batch = runner._batch(step)
    return runner.model(replace(batch, logits_rows=None))
