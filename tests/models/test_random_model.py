"""Random weights of true shape, and experts that are MXFP4 or FP8 in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.layout import Layout, LayoutError
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.layers import experts
from rose_dist.layers.expert_matrices import MoeWeights
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from rose_dist.models.gpt_oss import GptOssForCausalLM, GptOssModel, fp8_exchange
from rose_dist.models.loader import load_model, random_model, read_model_config
from tests.models.forward import all_logits
from tests.ranks import run_ranks


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


def quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decoded experts take rows that have gone through FP8; all else of them stays."""
    exact = experts.grouped_linear

    def of_quantised(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return exact(dequantize(*quantize(x, FP8), FP8, dtype=torch.float32), *arguments)

    monkeypatch.setattr(experts, "grouped_linear", of_quantised)


@pytest.mark.parametrize("stored", ["mxfp4", "bf16"])
def test_fp8_experts_give_the_logits_of_their_dequantised_matrices(
    stored: Literal["mxfp4", "bf16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows quantised where FP8 quantises them. MXFP4's values are FP8's as well; bf16's become so here."""
    write_random_checkpoint(PRESETS["tiny"], tmp_path, weights=stored)
    decoded, kept = (load_model(tmp_path, options(kind)) for kind in ("bf16", "fp8"))
    assert sum(p.nbytes for p in kept.parameters()) < 0.6 * sum(p.nbytes for p in decoded.parameters())
    found, unquantised = logits(kept, tmp_path), logits(decoded, tmp_path)
    for one, other in zip(kept.model.layers, decoded.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            matrix = getattr(other.mlp.experts, name).weight
            now = torch.stack([getattr(one.mlp.experts, name).weight.dequantize(e) for e in range(len(matrix))])
            assert (now - matrix).norm() <= (0.04 * matrix.norm() if stored == "bf16" else 0)
            matrix.copy_(now)
    quantising(monkeypatch)
    expected = logits(decoded, tmp_path)
    assert (found - expected).norm() / expected.norm() < 1e-4
    assert 1e-3 < (found - unquantised).norm() / unquantised.norm() < 0.1


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.mpi(2), id="tp2-ep2"),
        pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.mpi(2), id="dp2-ep2"),
    ],
)
def test_fp8_experts_spread_over_ranks(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Their second bias is added on the way back."""
    write_random_checkpoint(PRESETS["tiny"], tmp_path)
    prompts = [list(range(20)), list(range(40, 47))]
    alone = all_logits(World.join(), tmp_path, {}, prompts, 64, "fp8")
    assert alone is not None
    for found in run_ranks(2, all_logits, tmp_path, sizes, prompts, 64, "fp8", timeout=120):
        for prompt, expected in (alone if found is not None else {}).items():
            if prompt in found:
                np.testing.assert_allclose(found[prompt], expected, atol=1e-3)


def test_fp8_on_gpus_is_refused_between_replicas() -> None:
    sizes = AllToAllConfig(num_experts=8, top_k=4, hidden=64, max_tokens=1, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="an ep that divides tp, or --moe-weights mxfp4"):
        fp8_exchange(sizes, GpuOptions(device=torch.device("cuda", 0)), Layout(2, tp=1, dp=2, ep=2))


@pytest.mark.parametrize(
    ("name", "kind", "most"),
    [
        ("gpt-oss-120b", "mxfp4", 66e9),
        ("gpt-oss-120b", "fp8", 122e9),
        ("gpt-oss-20b", "mxfp4", 14e9),
        ("gpt-oss-20b", "fp8", 23e9),
    ],
)
def test_memory_of_the_published_models(name: str, kind: MoeWeights, most: float) -> None:
    config, groups = read_model_config(Path(name)), World.join().groups(Layout.of(1))
    sizes = AllToAllConfig(num_experts=config.num_local_experts, top_k=4, hidden=config.hidden_size, max_tokens=1)
    with torch.device("meta"):
        model = GptOssModel(config, groups.tp, Local(sizes), BuildOptions(groups, 1, torch.bfloat16, moe_weights=kind))
    head = model.embed_tokens.weight.nbytes
    assert 0.9 * most < sum(parameter.nbytes for parameter in model.parameters()) + head < most


@pytest.mark.parametrize("kind", ["bf16", "mxfp4", "fp8"])
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
