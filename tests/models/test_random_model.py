"""Random weights of true shape, and experts that stay MXFP4 in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.layers.expert_matrices import MoeWeights
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.loader import load_model, random_model, read_model_config


def options(moe_weights: MoeWeights = "bf16") -> BuildOptions:
    return BuildOptions(World.join().groups(Layout.of(1)), 64, moe_weights=moe_weights)


def logits(model: GptOssForCausalLM, folder: Path) -> torch.Tensor:
    runner = ModelRunner(model, EngineConfig(folder, kv_tokens=256, max_step_tokens=64))
    tables = [(0, [0, 1]) for _ in runner.specs]
    found = runner.run(Step([SequenceStep(list(range(30)), 0, tables, True)]))
    assert found is not None
    return found


def test_packed_experts_give_the_logits_of_decoded_ones(tmp_path: Path) -> None:
    write_random_checkpoint(PRESETS["tiny"], tmp_path)
    decoded, packed = (load_model(tmp_path, options(kind)) for kind in ("bf16", "mxfp4"))
    torch.testing.assert_close(logits(packed, tmp_path), logits(decoded, tmp_path), rtol=1e-4, atol=1e-4)
    assert sum(p.nbytes for p in packed.parameters()) < 0.5 * sum(p.nbytes for p in decoded.parameters())


def test_bf16_experts_are_not_packed(tmp_path: Path) -> None:
    write_random_checkpoint(PRESETS["tiny"], tmp_path, weights="bf16")
    with pytest.raises(ValueError, match="can't be held as MXFP4"):
        load_model(tmp_path, options("mxfp4"))


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_random_weights_are_seeded_finite_and_spread_over_the_experts(tmp_path: Path, kind: MoeWeights) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["tiny"])))
    one, same, other = (random_model(tmp_path, options(kind), seed) for seed in (1, 1, 2))
    assert torch.equal(logits(one, tmp_path), logits(same, tmp_path))
    assert not torch.equal(logits(one, tmp_path), logits(other, tmp_path))
    assert logits(one, tmp_path).isfinite().all()
    assert 0.3 < logits(one, tmp_path).std() < 3
    x = torch.randn(2000, 64)
    for layer in one.model.layers:
        counts = layer.mlp.router(x).topk(4).indices.flatten().bincount(minlength=8)
        assert counts.min() > 0.5 * counts.float().mean()


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_published_configurations_are_known_by_name(name: str, layers: int, experts: int) -> None:
    config = read_model_config(Path(name))
    assert (config.num_hidden_layers, config.num_local_experts, config.mxfp4) == (layers, experts, True)
