"""Both tensor layouts in MXFP4 against OpenAI's model, and checkpoints that can't be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpt_oss.torch.model import Transformer
from safetensors.torch import load_file, save_file

from rose_dist.comm.world import World
from rose_dist.models.checkpoint import CheckpointError
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from rose_dist.models.gpt_oss_spellings import ConfigError
from tests.checkpoints import random_prompt
from tests.models.forward import all_logits
from tests.ranks import run_ranks

PROMPTS = [random_prompt(7, 1), random_prompt(200, 2)]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mxfp4")
    for layout in ("hf", "openai"):
        write_random_checkpoint(PRESETS["tiny"], folder / layout, layout=layout, weights="mxfp4")  # type: ignore[arg-type]
    return {layout: folder / layout for layout in ("hf", "openai")}


@pytest.fixture(scope="module")
def expected(layouts: dict[str, Path]) -> list[torch.Tensor]:
    model = Transformer.from_checkpoint(str(layouts["openai"]), device="cpu").float()  # type: ignore[arg-type]
    for module in model.modules():
        if hasattr(module, "rope"):
            module.rope.dtype = torch.float32
    with torch.inference_mode():
        return [model(torch.tensor(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("layout", ["hf", "openai"])
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(1, {}, id="one-rank"),
        pytest.param(2, {"tp": 2, "ep": 1}, marks=pytest.mark.mpi(2), id="tp2-sliced-experts"),
        pytest.param(4, {"tp": 2, "dp": 2, "ep": 4}, marks=pytest.mark.mpi(4), id="tp2-dp2-ep4"),
    ],
)
def test_mxfp4_gives_openais_logits(
    layouts: dict[str, Path], expected: list[torch.Tensor], layout: str, ranks: int, sizes: dict[str, int]
) -> None:
    if ranks == 1:
        results = [all_logits(World.join(), layouts[layout], sizes, PROMPTS, 64)]
    else:
        results = run_ranks(ranks, all_logits, layouts[layout], sizes, PROMPTS, 64)
    assert results[0] is not None
    assert results[0].keys() == {0, 1}
    for prompt, logits in results[0].items():
        torch.testing.assert_close(torch.from_numpy(logits), expected[prompt], atol=1e-4, rtol=0)


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def edit_config(**fields: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def name_a_second_shard(folder: Path) -> None:
    weights = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    weights["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


SINKS = "model.layers.1.self_attn.sinks"
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*.safetensors file"),
        (cut, "cut short"),
        (name_a_second_shard, r"lacks model-00002-of-00002.safetensors"),
        (edit_tensors(lambda tensors: tensors.pop(SINKS)), f"missing: {SINKS}"),
        (edit_tensors(lambda tensors: tensors.update(extra=torch.zeros(1))), "not part of this model: extra"),
        (edit_tensors(lambda t: t.update({SINKS: torch.zeros(3)})), rf"{SINKS} \[3\] instead of \[8\]"),
        (edit_tensors(lambda t: t.update({BLOCKS: t[BLOCKS].float()})), rf"{BLOCKS} torch.float32 instead of"),
        (edit_tensors(lambda t: t.update({SINKS: t[SINKS].int()})), "dtype"),
        (edit_config(architectures=["LlamaForCausalLM"]), "supported is GptOssForCausalLM"),
        (edit_config(num_hidden_layers=None), "num_hidden_layers is None; it must be a whole number above 0"),
        (edit_config(head_dim="64"), "head_dim is '64'"),
        (edit_config(rope_parameters=7), "another type"),
        (edit_config(quantization_config={"quant_method": "awq"}), "'awq' is not supported"),
        (edit_config(num_hidden_layers=5, layer_types=None), r"missing: model.layers.4.* more"),
        (edit_config(num_hidden_layers=5), "layer_types must have 5 entries"),
        (edit_config(layer_types=["linear_attention"] * 4), "each of sliding_attention and full_attention"),
        (edit_config(hidden_act="gelu"), "hidden_act is 'gelu'; GPT-OSS's is 'silu'"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_says_why(
    layouts: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(layouts["hf"], folder)
    damage(folder)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        all_logits(World.join(), folder, {}, PROMPTS, 64)
