"""A whole model's decode step and prefill on an emulated GPU: every kernel of the step is interpreted, torch's own
operations run as they are. Shows that layers hand the kernels what they take, and that all of it together is the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.decode_batch import DecodeBatch, TableShape
from rose_dist.engine.decode_graphs import DecodeGraphs
from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.engine.request import Request
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.sampler import Sampler
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels import deep_gemm, fp8_experts, mxfp4_e4m3, paged_prefill
from rose_dist.kernels.arch import HOPPER, DeviceInfo
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.expert_matrices import MoeActivations, MoeWeights, PackedMatrix
from rose_dist.layers.forward_batch import KVStorage
from rose_dist.layers.moe import many_rows
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint
from rose_dist.models.gpt_oss import GptOssForCausalLM, fp8_exchange
from rose_dist.models.loader import load_model
from tests.kernels.conftest import emulated
from tests.kernels.deep_gemm_emulation import EmulatedDeepGemm

CONFIG = PRESETS["tiny"] | {
    "num_hidden_layers": 2, "num_experts": 4, "experts_per_token": 2, "vocab_size": 64, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SIZES = EngineConfig(Path(), dtype="bfloat16", kv_tokens=256, max_step_tokens=32, max_running=4, max_context=128)


def resident(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives tensors in emulated memory, whose results under torch's own operations are there too."""

    class Resident(type(gpu.tensor(torch.zeros(1)))):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result if func.__name__ in ("__get__", "tolist") else tree_map(settle, result)

    def settle(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return value
        try:
            gpu.machine.addresses.find(value.data_ptr(), 1)
        except Exception:
            value = gpu.tensor(value.as_subclass(torch.Tensor))
        return value.as_subclass(Resident)

    make = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        return settle(make(*shape, **options)) if options.get("device") is not None else make(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return settle


def moved(model: GptOssForCausalLM, place: Any, way: str) -> None:
    """Put the weights into emulated memory, and give the model the exchange of a GPU."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            if parameter is None:
                setattr(module, name, None)
            else:
                module.__dict__[name] = place(parameter.data)
        if isinstance(module, PackedMatrix):
            module.__dict__.pop("packed", None)
    model.model.cos, model.model.sin = place(model.model.cos), place(model.model.sin)
    for expert_map in model.model.expert_maps:
        expert_map.load = place(expert_map.load)
    exchange = model.model.exchange
    assert isinstance(exchange, Local)
    sizes, gpu = exchange.config, GpuOptions(device=torch.device("cuda", 0))
    if way.startswith("fp8"):
        sizes, gpu = fp8_exchange(sizes, gpu, Layout.of(1))
    if way == "fp8, as many tokens are":
        gpu = replace(gpu, few_layout=None)
    if way.startswith("mxfp4"):
        rows: MoeActivations = "fp8" if way == "mxfp4, rows in fp8" else "bf16"
        gpu = replace(gpu, groups=many_rows(sizes.top_k, sizes.num_experts, rows))
    on_gpu = Local(sizes, gpu=gpu)
    for layer in model.model.layers:
        assert isinstance(layer, nn.Module)
        layer.mlp.exchange = on_gpu


def emulated_runner(
    folder: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch, way: str = "mxfp4"
) -> tuple[ModelRunner, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """A runner whose model, cache and inputs are on an emulated GPU, that, and what moves a tensor there."""
    model = load_model(folder, options)
    runner = ModelRunner(model, SIZES)
    gpu = emulated(monkeypatch, "sm_90a")
    place = resident(gpu, monkeypatch)
    moved(model, place, way)
    runner.storages = [KVStorage(place(s.keys), place(s.values)) for s in runner.storages]
    runner.sampled = place(torch.tensor([7, 9, 0, 0]))
    runner._workspace = DecodeWorkspace.allocate(
        requests=4, query_heads=4, key_heads=2, head_dim=64, context=128, device=torch.device("cuda", 0)
    )

    monkeypatch.setattr(runner._inputs, "put", lambda array: place(torch.from_numpy(array)))
    runner._planners = [
        PagedPlanner(i, spec.window, 16, storage, runner._inputs, runner._workspace)
        for i, (spec, storage) in enumerate(zip(runner.specs, runner.storages, strict=True))
    ]
    if way != "mxfp4":
        # What attention rounds otherwise, FP8's roundings would make more of.
        monkeypatch.setattr(paged_prefill, "PREFILL_TILINGS", {})
        flash = paged_prefill._flash_on_cpu
        monkeypatch.setattr(paged_prefill, "_flash", lambda *given: tuple(map(place, flash(*given))))
    return runner, gpu, place


@torch.inference_mode()
@pytest.mark.parametrize(
    ("way", "experts"),
    [("mxfp4", 4), ("mxfp4", 32), ("mxfp4, rows in fp8", 4), ("fp8", 4), ("fp8", 32), ("fp8, as many tokens are", 4)],
)
def test_steps_are_those_of_the_cpu(way: str, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode. With 32 experts a decode step's few rows go through the layers' short way, in MXFP4. FP8:
    what the GPU computes is what the CPU's reference does, rounded in the same places.
    """
    write_random_checkpoint(CONFIG | {"num_experts": experts}, tmp_path)
    kind: MoeWeights = "mxfp4" if way.startswith("mxfp4") else "fp8"
    rows: MoeActivations = "fp8" if way == "mxfp4, rows in fp8" else "bf16"
    options = BuildOptions(
        World.join().groups(Layout.of(1)), 32, torch.bfloat16, moe_weights=kind, moe_activations=rows
    )
    monkeypatch.setattr(mxfp4_e4m3, "LEAST_ROWS", 17)
    library = EmulatedDeepGemm()
    monkeypatch.setattr(deep_gemm, "load", lambda: library)
    monkeypatch.setattr(fp8_experts, "device_info", lambda index: DeviceInfo(HOPPER, 4))
    plain = ModelRunner(load_model(tmp_path, options), SIZES)
    prefill = Step([SequenceStep([1, 2, 3, 4, 5] * 4, 0, [(0, [3, 5]), (0, [2, 4])], True)])
    decode = Step(
        [
            SequenceStep([7], 0, [(0, [1]), (0, [1])], True),
            SequenceStep([9], 20, [(0, [3, 5]), (0, [2, 4])], True),
        ]
    )
    alone = Step(decode.sequences[1:])
    expected_first, expected, expected_alone = (plain.run(step) for step in (prefill, decode, alone))
    assert expected_first is not None
    assert expected is not None

    runner, gpu, place = emulated_runner(tmp_path, options, monkeypatch, way)
    model, storages, workspace = runner.model, runner.storages, runner._workspace
    first = runner.run(prefill)
    # Where bf16 rounds otherwise, rows in FP8 get other codes: the CPU's own logits are 3 % from those in fp32 then.
    most = 0.04 if rows == "fp8" else 0.02
    assert_alike(first, expected_first, most)

    shapes = [TableShape.of(spec, 16, 128) for spec in runner.specs]
    batch = DecodeBatch(4, shapes, storages, runner.sampled, workspace)
    for fixed in (batch._numbers, batch._changes):
        fixed.device = place(fixed.device)
        fixed._hosts = list(map(place, fixed._hosts))
    batch._tables = [place(table) for table in batch._tables]
    # Three rows for two sequences; their tokens stand where the step before has left them.
    named = Step([SequenceStep([-1 - i], s.start, s.tables, True) for i, s in enumerate(decode.sequences)])
    before = len(gpu.kernels)
    drawing = DeviceDraw(runner.sampled, 64)
    drawing._told = list(map(place, drawing._told))
    requests = [
        Request(b"", Generate(request_id="", prompt=[1], sampling=SamplingParams(temperature=t, top_k=k)), 9, 5, [])
        for t, k in ((0.0, 0), (1.5, 10))
    ]
    found = DecodeGraphs(model, batch, (3,), drawing).run(named, drawing.rules(requests))
    assert_alike(found, expected, most)
    plain_logits = found.as_subclass(torch.Tensor).clone()
    by_torch = Sampler(DeviceDraw(torch.zeros(4, dtype=torch.int64), 64)).sample(plain_logits, requests, None)
    assert runner.sampled.as_subclass(torch.Tensor).tolist() == [*by_torch.tokens.result().tolist(), 0, 0]
    assert torch.equal(drawing.told(2).result(), by_torch.tokens.result())
    # Behind the first norm stands what the embedding has written: the projection reads its angles early.
    assert next(kernel for kernel in gpu.kernels[before:] if type(kernel).__name__ == "RMSNorm").ends_chain
    ran, decoded = ([type(kernel).__name__ for kernel in gpu.kernels[at:]] for at in (0, before))
    assert set(ran) >= {"Embed", "RMSNorm", "QKNormRope", "SmallLinear", "DecodeAttention"}, ran
    assert ("PrefillAttention" in ran) == (way == "mxfp4"), ran
    assert ran.count("GatherGroups") == (2 if kind == "mxfp4" and experts == 4 else 0)
    assert "GroupRows" not in ran, ran
    if rows == "fp8":
        assert ran.count("E4m3ExpertGemm") == 4
    if kind == "fp8":
        assert set(ran) >= {"Quantize", "GatedActivation"}, ran
        # Two steps of two layers with two products each.
        assert library.calls == ["masked" if way == "fp8" else "contiguous"] * 8
        assert "RouteRows" not in decoded, decoded
    elif experts == 4:
        assert set(decoded) >= {"LinearRotary", "Route", "DispatchDecode", "ExpertLinear", "CombineNorm"}, decoded
        # No norm between layers has a launch of its own.
        assert decoded.count("RMSNorm") == 1 + 2, decoded
    else:
        layer = ["LinearRotary", "DecodeAttention", "LinearAdd", "RouteRows", "ExpertLinear", "CombineNorm"]
        few = ["CopyWords", "Embed", "RMSNorm", *2 * layer, "SmallLinear", "DrawRows", "CopyWords"]
        assert decoded == few, decoded
        # A single token's experts are handed over.
        before, graphs = len(gpu.kernels), DecodeGraphs(model, batch, (1,), drawing)
        assert_alike(graphs.run(alone, drawing.rules(requests[1:])), expected_alone, most)
        ran = [type(kernel).__name__ for kernel in gpu.kernels[before:]]
        assert ran == ["HandedExperts" if name == "ExpertLinear" else name for name in few], ran


def assert_alike(found: torch.Tensor | None, expected: torch.Tensor, most: float = 0.02) -> None:
    assert found is not None
    plain = found.as_subclass(torch.Tensor)
    error = (plain - expected).norm() / expected.norm()
    assert error < most, f"relative error {error}"
