"""Steps with prompts in them from captured pieces are the steps themselves. On an emulated GPU, where a graph is a list
of what was done while it was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine import prefill_graphs
from rose_dist.engine.config import prefill_ladder_for
from rose_dist.engine.engine import Engine
from rose_dist.engine.prefill_graphs import Place, PrefillGraphs
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels import launch
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import write_random_checkpoint
from rose_dist.models.loader import load_model
from tests.engine.test_emulated_gpu import CONFIG, SIZES, assert_alike, emulated_runner


class RecordedGraph(TorchDispatchMode):
    """Does again, on the same tensors, what was done between begin and end."""

    current: RecordedGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Callable[[], Any]] = []

    def capture_begin(self, **_: Any) -> None:
        assert RecordedGraph.current is None
        RecordedGraph.current = self
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        RecordedGraph.current = None

    def replay(self) -> None:
        for do in self.done:
            do()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done.append(partial(again, func, args, kwargs or {}, result))
        return result


def again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Repeat an operation into the memory of its first result."""
    for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded; what captures them does so without a GPU."""
    run = launch.run

    def recorded(*launched: Any) -> None:
        if RecordedGraph.current is not None:
            RecordedGraph.current.done.append(partial(run, *launched))
        run(*launched)

    monkeypatch.setattr(launch, "run", recorded)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    for name in ("Place", "borrowed"):
        monkeypatch.setattr(prefill_graphs, name, lambda tensor: tensor)


@torch.inference_mode()
def test_prefill_and_mixed_steps_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(CONFIG, tmp_path)
    options = BuildOptions(World.join().groups(Layout.of(1)), 32, torch.bfloat16, moe_weights="mxfp4")
    plain = ModelRunner(load_model(tmp_path, options), SIZES)
    first = [(0, [3, 5]), (0, [2, 4])]
    steps = [
        Step([SequenceStep([1, 2, 3, 4, 5] * 3 + [6], 0, first, True)]),
        # One sequence decodes, one goes on with its prompt, another starts, and wants no token yet.
        Step(
            [
                SequenceStep([9], 16, first, True),
                SequenceStep([11, 12, 13], 0, [(0, [6]), (0, [7])], True),
                SequenceStep([21, 22, 23, 24, 25], 0, [(0, [8]), (0, [9])], False),
            ]
        ),
        # Prompts that go on where earlier steps, or other requests with the same beginning, have ended.
        Step(
            [
                SequenceStep([14, 15, 16, 17, 18, 19, 20], 3, [(0, [6]), (0, [7])], True),
                SequenceStep([26, 27], 5, [(0, [8]), (0, [9])], True),
                SequenceStep([31, 32, 33], 16, [(0, [3, 10]), (0, [2, 11])], True),
            ]
        ),
    ]
    expected = [plain.run(step) for step in steps]
    runner, _, place = emulated_runner(tmp_path, options, monkeypatch)
    record(monkeypatch)
    graphs = PrefillGraphs(runner.model, runner.storages, runner.sampled, (12, 16), 16)
    graphs._memory = place(graphs._memory)
    # Steps of chunks alone come from whole passes.
    assert [graphs.serves_whole(step) for step in steps] == [True, False, True]
    graphs.capture()
    runner._prefill_graphs = graphs
    for step, wanted in zip(steps, expected, strict=True):
        assert wanted is not None
        assert_alike(runner.run(step), wanted)
    chosen = [expert_map.load.as_subclass(torch.Tensor).sum() for expert_map in runner.model.model.expert_maps]
    assert sum(chosen) == sum(step.token_count for step in steps) * 2 * CONFIG["num_hidden_layers"]


@pytest.mark.gpu(1)
@torch.inference_mode()
def test_on_a_gpu_steps_are_those_without_graphs(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    write_random_checkpoint(CONFIG, tmp_path)
    groups = World.join().groups(Layout.of(1))
    plain, graphed = (
        Engine.load(
            replace(SIZES, model=tmp_path, device=torch.device("cuda", 0), moe_weights="mxfp4", prefill_ladder=ladder),
            groups,
        ).runner
        for ladder in ((), (12, 16, 32))
    )
    for tokens, decodes in ((16, 0), (7, 3), (30, 2), (12, 1)):
        decoding = [SequenceStep([9], 3, [(0, [i]), (0, [i])], True) for i in range(decodes)]
        step = Step([*decoding, SequenceStep(list(range(tokens)), 0, [(0, [5, 6]), (0, [7, 8])], True)])
        assert_alike(graphed.run(step), plain.run(step))


def test_a_place_is_the_tensor_there() -> None:
    """numpy reads the same description of memory under another name."""
    tensor = torch.randn(5, 6, 64).bfloat16()[:, 1:3]
    place = Place(tensor)

    class Described:
        __array_interface__ = place.__cuda_array_interface__

    assert torch.equal(torch.from_numpy(np.asarray(Described())).view(torch.bfloat16), tensor)


def test_the_ladder_ends_where_steps_do() -> None:
    assert prefill_ladder_for(100) == (16, 32, 48, 64, 96, 100)
    assert prefill_ladder_for(64) == (16, 32, 48, 64)
    assert prefill_ladder_for(8192)[-1] == 4096
