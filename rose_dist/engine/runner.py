"""Runs steps on this rank's part of the model: plans become tensors, tensors become logits."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.attention_planner import AttentionPlanner, GatheringPlanner
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.decode_batch import DecodeBatch, TableShape
from rose_dist.engine.decode_graphs import DecodeGraphs
from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.kv_groups import group_specs, kv_bytes
from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.prefill_graphs import PrefillGraphs
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.engine.step_inputs import StepInputs
from rose_dist.engine.token_numbers import TokenNumbers
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.forward_batch import ForwardBatch
from rose_dist.models.gpt_oss import GptOssForCausalLM

WARM_UP_TOKENS = (1, 8, 32, 100, 300, 1000, 2000)
"""Prompts that between them meet every kernel."""
ROW_MULTIPLE = 4
"""Lines of this many numbers begin where any kernel may read 32 bytes at once."""


class ModelRunner:
    """The model, its KV storage and the way from a `Step` to a `ForwardBatch`.

    sampled: int64 [most running requests] on the device: what the last step drew, by its rows. A step that starts
        before the host knows these tokens names them by row.
    """

    def __init__(self, model: GptOssForCausalLM, config: EngineConfig) -> None:
        self.model = model
        self.config = config
        self._block_size = config.block_size
        self.max_context = min(config.max_context or model.config.max_context, model.config.max_context)
        self.specs = group_specs(model.kv_groups, config)
        self.storages = [
            group.storage(spec.blocks * config.block_size, config.torch_dtype, config.device)
            for group, spec in zip(model.kv_groups, self.specs, strict=True)
        ]
        self.sampled = torch.zeros(config.max_running, dtype=torch.int64, device=config.device)
        self.device_draw = DeviceDraw(self.sampled, model.config.vocab_size)
        self._inputs = StepInputs(config.device)
        self._workspace = self._decode_workspace()
        self._planners: list[AttentionPlanner] = [self._planner(number) for number in range(len(self.specs))]
        self._graphs = self._decode_graphs() if config.ladder else None
        self._prefill_graphs = (
            PrefillGraphs(model, self.storages, self.sampled, config.prefill_ladder, config.block_size)
            if config.prefill_ladder
            else None
        )

    def _planner(self, number: int) -> AttentionPlanner:
        window, storage = self.specs[number].window, self.storages[number]
        if self.config.device.type == "cpu":
            return GatheringPlanner(number, window, self._block_size, storage, self.config.torch_dtype)
        return PagedPlanner(number, window, self._block_size, storage, self._inputs, self._workspace)

    def _decode_workspace(self) -> DecodeWorkspace | None:
        """One for all layers and steps: those follow one another."""
        if self.config.device.type == "cpu":
            return None
        group = self.model.kv_groups[0]
        return DecodeWorkspace.allocate(
            requests=self.config.max_running, query_heads=self.model.query_heads, key_heads=group.key_heads,
            head_dim=group.head_dim, context=self.max_context, device=self.config.device,
        )  # fmt: skip

    def _decode_graphs(self) -> DecodeGraphs:
        shapes = [TableShape.of(spec, self._block_size, self.max_context) for spec in self.specs]
        batch = DecodeBatch(max(self.config.ladder), shapes, self.storages, self.sampled, self._workspace)
        return DecodeGraphs(self.model, batch, self.config.ladder, self.device_draw)

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache once every block has been written."""
        return kv_bytes(self.model.kv_groups, self.specs, self.config)

    def warm_up(self) -> None:
        """Run prompts of several lengths, so that no request waits for a kernel to be compiled or loaded and too little
        memory shows at once; then capture graphs. Collective as `run` is; overwrites the cache.
        """
        most = min(self.config.max_step_tokens, self.max_context, min(s.blocks for s in self.specs) * self._block_size)
        for tokens in sorted({min(tokens, most) for tokens in (*WARM_UP_TOKENS, most)}):
            blocks = list(range(-(-tokens // self._block_size)))
            prompt = [i % self.model.config.vocab_size for i in range(tokens)]
            logits = self.run(Step([SequenceStep(prompt, 0, [(0, blocks) for _ in self.specs], True)]))
            if logits is not None:
                self.device_draw.warm_up(logits)
        if self._graphs is not None:
            self._graphs.capture()
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture()

    def draws(self, step: Step) -> bool:
        """Whether `run` can draw the step's tokens too."""
        return self._graphs is not None and step.decodes_only and self.device_draw.serves

    @torch.inference_mode()
    def run(self, step: Step, rules: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """Collective over the ranks that share experts or heads; an empty step takes part in their exchanges.

        Args:
            rules: int64 [4, sequences], see `DeviceDraw`; the tokens are then in `sampled`. Only where `draws` says so.

        Returns:
            fp32 [sequences that sample, vocabulary] on the first rank of the tensor-parallel group, None elsewhere.
            Valid until the next call.
        """
        if self._graphs is not None and step.decodes_only:
            return self._graphs.run(step, rules)
        graphs = self._prefill_graphs
        rows = None if graphs is None else graphs.rows_for(step.token_count)
        if graphs is not None and rows is not None:
            if graphs.serves_whole(step):
                return graphs.run_whole(step, rows, _wanted_rows(step))
            return graphs.run(*self._numbered_batch(step, rows))
        logits: Tensor | None = self.model(self._batch(step))
        return logits

    @torch.inference_mode()
    def share_sampled(self) -> None:
        """Give the tensor-parallel peers what the first rank has left in `sampled`. Collective over them."""
        if self.model.tp.size > 1:
            self.model.tp.broadcast(self.sampled)

    def _batch(self, step: Step) -> ForwardBatch:
        batch, _ = self._numbered_batch(step, -(-step.token_count // ROW_MULTIPLE) * ROW_MULTIPLE)
        return batch

    def _numbered_batch(self, step: Step, rows: int) -> tuple[ForwardBatch, TokenNumbers]:
        """What the model takes, and the numbers that its tensors are part of, with so many rows."""
        sequences, tokens = step.sequences, step.token_count
        array = TokenNumbers.array(sequences, len(self.specs), self._block_size, rows)
        numbers = TokenNumbers(self._inputs.put(array))
        logits_rows = self._inputs.put(np.array(_wanted_rows(step), np.int64))
        groups = tuple(
            planner.plan(sequences, numbers.slots(number)[:tokens]) for number, planner in enumerate(self._planners)
        )
        self._inputs.send()
        batch = ForwardBatch(
            numbers.token_ids[:tokens], numbers.positions[:tokens], logits_rows, groups, sampled=self.sampled
        )
        return batch, numbers


def _wanted_rows(step: Step) -> list[int]:
    """Whose logits are wanted: of sequences that sample, the last tokens."""
    ends = accumulate(len(sequence.tokens) for sequence in step.sequences)
    return [end - 1 for end, sequence in zip(ends, step.sequences, strict=True) if sequence.sample]
