"""Checkpoints in both layouts and representations: the bytes, and the logits of two reference implementations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpt_oss.torch.model import Transformer
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from rose_dist.models.checkpoint import CheckpointError
from rose_dist.models.convert.layouts import convert_checkpoint
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from rose_dist.models.gpt_oss_spellings import ConfigError, Layout, Weights, to_hf, to_openai

SMALL = PRESETS["tiny"] | {"num_hidden_layers": 2, "num_experts": 5, "experts_per_token": 3, "hidden_size": 96}
COMBINATIONS: list[tuple[Layout, Weights]] = [("hf", "mxfp4"), ("hf", "bf16"), ("openai", "mxfp4")]
PROMPT = torch.arange(40) * 37 % 512


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bytes(a: Path, b: Path) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def transformers_logits(folder: Path) -> torch.Tensor:
    config = GptOssConfig.from_pretrained(folder)
    quantized = {"quantization_config": Mxfp4Config(dequantize=True)} if hasattr(config, "quantization_config") else {}
    model, info = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **quantized
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        logits: torch.Tensor = model.eval().float()(PROMPT[None]).logits[0]
    return logits


def reference_logits(folder: Path) -> torch.Tensor:
    model = Transformer.from_checkpoint(str(folder), device="cpu").float()  # type: ignore[arg-type]
    for module in model.modules():
        if hasattr(module, "rope"):
            module.rope.dtype = torch.float32
    with torch.inference_mode():
        logits: torch.Tensor = model(PROMPT)
    return logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Layout, Weights], Path]:
    folder = tmp_path_factory.mktemp("made")
    paths = {}
    for layout, weights in COMBINATIONS:
        paths[layout, weights] = folder / f"{layout}-{weights}"
        write_random_checkpoint(SMALL, paths[layout, weights], seed=3, layout=layout, weights=weights)
    return paths


@pytest.mark.parametrize("source", COMBINATIONS)
@pytest.mark.parametrize("target", COMBINATIONS)
def test_converting_gives_what_making_it_there_gives(
    made: dict[tuple[Layout, Weights], Path],
    tmp_path: Path,
    source: tuple[Layout, Weights],
    target: tuple[Layout, Weights],
) -> None:
    """Also from bf16 to MXFP4, because these weights came from MXFP4: the values must then be the same."""
    convert_checkpoint(made[source], tmp_path / "out", layout=target[0], weights=target[1])
    if source[1] == "bf16" and target[1] == "mxfp4":
        convert_checkpoint(tmp_path / "out", tmp_path / "back", layout="hf", weights="bf16")
        assert_same_bytes(tmp_path / "back", made["hf", "bf16"])
    else:
        assert_same_bytes(tmp_path / "out", made[target])


def test_both_references_read_every_checkpoint_as_the_same_model(made: dict[tuple[Layout, Weights], Path]) -> None:
    expected = reference_logits(made["openai", "mxfp4"])
    assert 0.3 < expected.std() < 10
    for weights in ("mxfp4", "bf16"):
        logits = transformers_logits(made["hf", weights])
        assert (logits - expected).abs().max() <= 1e-4, weights


def test_a_sharded_target_is_one_that_transformers_reads(
    made: dict[tuple[Layout, Weights], Path], tmp_path: Path
) -> None:
    limit = 60_000
    convert_checkpoint(made["hf", "mxfp4"], tmp_path / "out", shard_bytes=limit)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    sizes = {file.name: sum(t.nbytes for t in load_file(file).values()) for file in files}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in files:
        held = load_file(file)
        assert sizes[file.name] <= limit or len(held) == 1
        assert all(index["weight_map"][name] == file.name for name in held)
    assert_same_bytes(tmp_path / "out", made["hf", "mxfp4"])
    assert torch.equal(transformers_logits(tmp_path / "out"), transformers_logits(made["hf", "mxfp4"]))


def test_other_files_of_the_folder_come_along(made: dict[tuple[Layout, Weights], Path], tmp_path: Path) -> None:
    convert_checkpoint(made["hf", "bf16"], tmp_path / "source")
    (tmp_path / "source/tokenizer.json").write_text("{}")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", weights="mxfp4")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_tied_output_weights_are_written_out_for_openai(tmp_path: Path) -> None:
    config = to_hf(SMALL) | {"tie_word_embeddings": True}
    write_random_checkpoint(config, tmp_path / "tied")
    assert "lm_head.weight" not in tensors(tmp_path / "tied")
    convert_checkpoint(tmp_path / "tied", tmp_path / "openai", layout="openai")
    difference = reference_logits(tmp_path / "openai") - transformers_logits(tmp_path / "tied")
    assert difference.abs().max() <= 1e-4


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_checkpoint(SMALL, tmp_path / name, seed=seed)
    assert_same_bytes(tmp_path / "a", tmp_path / "b")
    first, other = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("preset", PRESETS)
def test_configs_translate_both_ways(preset: str) -> None:
    openai = dict(PRESETS[preset])
    assert to_openai(to_hf(openai)) == openai
    ours, theirs = to_hf(openai), GptOssConfig(**to_hf(openai)).to_dict()
    assert {key: theirs[key] for key in ours if key != "dtype"} == {key: ours[key] for key in ours if key != "dtype"}


def test_a_config_without_yarn_translates_both_ways() -> None:
    openai = SMALL | {"rope_scaling_factor": 1.0, "rope_ntk_beta": 32.0}
    assert to_hf(openai)["rope_parameters"] == {"rope_type": "default", "rope_theta": 150000.0}
    assert to_openai(to_hf(openai)) == openai


def test_published_hugging_face_spelling_is_read() -> None:
    """gpt-oss-20b's config.json has rope_scaling and rope_theta; transformers 5 writes rope_parameters."""
    config = to_hf(PRESETS["20b"])
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    assert to_openai(config) == PRESETS["20b"]


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"swiglu_alpha": 1.5},
        {"attention_bias": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
)
def test_what_openai_cannot_express_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change)).removesuffix("parameters")):
        to_openai(to_hf(SMALL) | change)


def test_openai_has_no_bf16_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MXFP4 only"):
        write_random_checkpoint(SMALL, tmp_path / "out", layout="openai", weights="bf16")
    assert list(tmp_path.iterdir()) == []


def damage(folder: Path, kind: str) -> None:
    stored = tensors(folder)
    file = folder / "model.safetensors"
    if kind == "missing":
        del stored["model.layers.1.self_attn.sinks"]
    elif kind == "surplus":
        stored["model.layers.1.self_attn.sinks2"] = torch.zeros(1)
    elif kind == "misshapen":
        stored["model.layers.1.self_attn.sinks"] = torch.zeros(3)
    save_file(stored, file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"missing: model.layers.1.self_attn.sinks"),
        ("surplus", r"not part of this model: model.layers.1.self_attn.sinks2"),
        ("misshapen", r"sinks \[3\] instead of \[8\]"),
        ("truncated", r"cut short"),
    ],
)
def test_a_damaged_source_leaves_no_target(tmp_path: Path, kind: str, message: str) -> None:
    write_random_checkpoint(SMALL, tmp_path / "source")
    damage(tmp_path / "source", kind)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="openai")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_matrix_with_nan_cannot_become_mxfp4(tmp_path: Path) -> None:
    write_random_checkpoint(SMALL, tmp_path / "source", weights="bf16")
    stored = tensors(tmp_path / "source")
    stored["model.layers.0.mlp.experts.down_proj"][2, 5, 7] = torch.nan
    save_file(stored, tmp_path / "source/model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.experts.down_proj holds NaN"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", weights="mxfp4")


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_random_checkpoint(SMALL, tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        write_random_checkpoint(SMALL, tmp_path / "out", seed=1)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
