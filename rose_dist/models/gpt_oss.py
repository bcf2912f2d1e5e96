"""GPT-OSS. Modules are named as in the checkpoint (Hugging Face layout)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from rose_dist.comm.all_to_all.create import create as create_all_to_all
from rose_dist.comm.all_to_all.create import region_bytes, sums_pay
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig
from rose_dist.comm.expert_placement import Placement
from rose_dist.comm.gpu_group import GpuGroup
from rose_dist.comm.layout import Layout, LayoutError
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.comm.tensor_group import TensorGroup
from rose_dist.kernels import layer_meeting
from rose_dist.kernels.arch import device_info
from rose_dist.kernels.formats import FP8
from rose_dist.kernels.fp8_experts import FEW, MANY, require
from rose_dist.kernels.linear_add import MAX_ROWS
from rose_dist.kernels.variants import Ranges
from rose_dist.layers.attention import Attention, HeadShare
from rose_dist.layers.embedding import OutputHead, VocabParallelEmbedding
from rose_dist.layers.expert_map import ExpertMap
from rose_dist.layers.experts import Experts, ExpertShare
from rose_dist.layers.forward_batch import ForwardBatch, GroupBatch, KVGroup
from rose_dist.layers.moe import MoE, many_rows
from rose_dist.layers.norm import RMSNorm
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.gpt_oss_config import GptOssConfig


class GptOssDecoderLayer(nn.Module):
    def __init__(
        self,
        config: GptOssConfig,
        heads: HeadShare,
        held: ExpertShare,
        tp: TensorGroup,
        exchange: AllToAll,
        expert_map: ExpertMap,
        options: BuildOptions,
    ) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, options.dtype
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.self_attn = Attention(hidden, heads, tp=tp, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        experts = Experts(
            hidden, config.intermediate_size, held, limit=config.swiglu_limit,
            stored="mxfp4" if config.mxfp4 else "bf16", kept=options.moe_weights, dtype=dtype,
            activations=options.moe_activations,
        )  # fmt: skip
        self.mlp = MoE(hidden, experts, config.num_experts_per_tok, exchange, expert_map, dtype=dtype)

    def forward(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, place: int, batch: GroupBatch,
        live_rows: Tensor | None, after: RMSNorm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """
        Args:
            x: `residual`, the layer's input [tokens, hidden], normalised.
            place: this layer's place in its KV group, whose part of the step is `batch`.
            live_rows: as in `ForwardBatch`.

        Returns:
            after(output), and the output.
        """
        attended = self.self_attn(x, cos, sin, place, batch)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp.add(normed, residual, after, live_rows)

    def takes_few(self, cache_dtype: torch.dtype) -> bool:
        """Whether `forward_few` serves this layer on a GPU."""
        return self.self_attn.takes_few(cache_dtype) and self.mlp.takes_few

    def forward_few(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, place: int, batch: GroupBatch,
        live_rows: Tensor | None, after: RMSNorm, ahead: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same for up to `MAX_ROWS` tokens, in 6 launches for 10, or 7 and more with several ranks: norms,
        residuals, rotary, routing and dispatch go with the launches beside them.

        Args:
            ahead: the weights that are read after the layer's.
        """
        total = self.self_attn.add_few(x, residual, cos, sin, place, batch)
        return self.mlp.add_few(total, self.post_attention_layernorm, after, live_rows, ahead), total


class GptOssModel(nn.Module):
    """Embedding, decoder layers and the last norm."""

    def __init__(self, config: GptOssConfig, tp: TensorGroup, exchange: AllToAll, options: BuildOptions) -> None:
        super().__init__()
        dtype, place, layout = options.dtype, options.groups.place, options.groups.layout
        heads = HeadShare(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, layout.tp, place.tp_rank
        )
        placement = Placement.initial(config.num_local_experts, layout.ep, options.redundant_experts)
        held = ExpertShare(
            config.num_local_experts, placement.of_rank(place.ep_rank), layout.expert_tp, place.expert_slice
        )
        self.exchange = exchange
        self.kv_groups = kv_groups(config, heads)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp=tp, dtype=dtype)
        self.expert_load = torch.zeros(config.num_hidden_layers, config.num_local_experts, dtype=torch.int64)
        # Tensor-parallel ranks hold the same tokens and must choose the same slots.
        self.expert_maps = [ExpertMap(placement, place.dp_rank, load) for load in self.expert_load]
        self.layers = nn.ModuleList(
            GptOssDecoderLayer(config, heads, held, tp, exchange, expert_map, options)
            for expert_map in self.expert_maps
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.cos, self.sin = config.rotary.tables()
        self.places = sorted_places(self.kv_groups)

    @property
    def decoder_layers(self) -> list[GptOssDecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, GptOssDecoderLayer)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[tokens, hidden], normalised, of the rows whose logits are wanted."""
        x, cos, sin = self.embed_tokens(batch, self.cos, self.sin)
        few, layers = self._takes_few(x, batch), self.decoder_layers
        afters = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        aheads = [*(layer.self_attn.qkv_proj.weight for layer in layers[1:]), None]
        # The rotary angles, which the next launch may read early, come from the embedding's.
        normed: Tensor = layers[0].input_layernorm(x, ends_chain=True)
        for layer, after, ahead, (group, place) in zip(layers, afters, aheads, self.places, strict=True):
            given = (normed, x, cos, sin, place, batch.groups[group], batch.live_rows, after)
            normed, x = layer.forward_few(*given, ahead) if few else layer(*given)
        return normed if batch.logits_rows is None else normed[batch.logits_rows]

    def _takes_few(self, x: Tensor, batch: ForwardBatch) -> bool:
        """A decode step of few tokens waits for launches more than for memory."""
        few = x.is_cuda and 0 < x.shape[0] <= MAX_ROWS and x.dtype is torch.bfloat16
        return few and self.decoder_layers[0].takes_few(batch.groups[0].storage.keys.dtype)


class GptOssForCausalLM(nn.Module):
    def __init__(self, config: GptOssConfig, options: BuildOptions) -> None:
        """Raises `LayoutError` if the heads can't be split over the tensor-parallel ranks."""
        super().__init__()
        check_layout(config, options.groups.layout, options.redundant_experts)
        self.config = config
        self.tp = _tensor_group(config, options)
        exchange = _exchange(config, options, self.tp)
        with options.device:
            self.model = GptOssModel(config, self.tp, exchange, options)
            self.lm_head = OutputHead(self.model.embed_tokens, tied=config.tie_word_embeddings)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.model.kv_groups

    @property
    def query_heads(self) -> int:
        """Of this rank."""
        return self.config.num_attention_heads // self.tp.size

    @property
    def rows_sent(self) -> Tensor:
        """int64 [1]: rows sent to experts of other ranks since start."""
        return self.model.exchange.rows_sent

    @property
    def expert_load(self) -> Tensor:
        """int64 [layers, experts], on the model's device: how often each expert was chosen by this rank's tokens."""
        return self.model.expert_load

    @property
    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.model.decoder_layers]

    def check(self) -> None:
        """Raise if a kernel has waited for another in vain; to be called after a step, reads host memory only."""
        self.model.exchange.check()
        layer_meeting.check()

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """fp32 [wanted rows, vocabulary] on the first rank of each tensor-parallel group, None on the others."""
        logits: Tensor | None = self.lm_head(self.model(batch))
        return logits


def _tensor_group(config: GptOssConfig, options: BuildOptions) -> TensorGroup:
    group = options.groups.tp
    if options.device.type == "cpu" or group.size == 1:
        return group
    return GpuGroup.create(
        group, options.device, hidden=config.hidden_size, dtype=options.dtype, max_rows=options.max_tokens
    )


def _exchange(config: GptOssConfig, options: BuildOptions, tp: TensorGroup) -> AllToAll:
    sizes = AllToAllConfig(
        num_experts=config.num_local_experts + options.redundant_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        rail_forwarding=options.rail_forwarding,
    )
    groups = options.groups
    if options.device.type == "cpu":
        return create_all_to_all(sizes, groups)
    gpu = GpuOptions(device=options.device, rank=groups.place.rank)
    if options.moe_weights == "fp8":
        sizes, gpu = fp8_exchange(sizes, gpu, groups.layout)
    elif options.moe_weights == "mxfp4" and groups.layout.moe_mode != "data_parallel":
        gpu = replace(gpu, groups=row_groups(sizes, options))
    sizes = replace(sizes, partial_sums=sums_pay(sizes, groups))
    memory = None
    if groups.layout.moe_mode == "data_parallel":
        size = region_bytes(sizes, groups.topology, tp=groups.layout.tp)
        memory = SymmetricMemory(groups.ep, options.device, size, groups.topology.far)
    return create_all_to_all(sizes, groups, gpu, tp.reduce if isinstance(tp, GpuGroup) else None, memory)


def row_groups(sizes: AllToAllConfig, options: BuildOptions) -> Ranges[torch.dtype | None] | None:
    """`GpuOptions.groups` for MXFP4 experts: where Hopper's kernels of many rows serve."""
    if not device_info(options.device.index).arch.hopper:
        return None
    # By the experts without their copies, as `MoE` expects rows.
    return many_rows(sizes.top_k, sizes.num_experts - options.redundant_experts, options.moe_activations)


def fp8_exchange(sizes: AllToAllConfig, gpu: GpuOptions, layout: Layout) -> tuple[AllToAllConfig, GpuOptions]:
    """The same with rows in FP8, packed as the experts' kernels want them. Raises `LayoutError` where these can't be
    had, and as `fp8_experts.require` does.
    """
    if layout.moe_mode == "data_parallel":
        raise LayoutError(
            f"--moe-weights fp8 with {layout}: on GPUs experts can't be spread over replicas yet, because rows would "
            "be packed for the most that all replicas may send; choose an ep that divides tp, or --moe-weights mxfp4"
        )
    require(gpu.device)
    travelling = replace(sizes, dtype=FP8.codes_dtype(), out_dtype=sizes.dtype, scale_dim=FP8.blocks(sizes.hidden))
    return travelling, replace(gpu, layout=MANY, few_layout=FEW, column_scales=True, late_bias=True)


def check_layout(config: GptOssConfig, layout: Layout, redundant_experts: int = 0) -> None:
    """Raises `LayoutError` for what the model can't be split over."""
    Placement.initial(config.num_local_experts, layout.ep, redundant_experts)
    allowed = HeadShare.allowed_tp(config.num_attention_heads, config.num_key_value_heads)
    if layout.tp not in allowed:
        raise LayoutError(
            f"tp {layout.tp} does not split {config.num_attention_heads} query heads and {config.num_key_value_heads} "
            f"key heads; possible are {', '.join(map(str, allowed))}"
        )


def kv_groups(config: GptOssConfig, heads: HeadShare) -> tuple[KVGroup, ...]:
    """Full-attention layers and sliding-window layers, each kind with its own block pool."""
    kinds = ((False, None), (True, config.sliding_window))
    by_kind = (
        (tuple(i for i, sliding in enumerate(config.sliding_layers) if sliding == wanted), window)
        for wanted, window in kinds
    )
    return tuple(KVGroup(layers, window, heads.local_key_heads, heads.head_dim) for layers, window in by_kind if layers)


def sorted_places(groups: tuple[KVGroup, ...]) -> list[tuple[int, int]]:
    """For each layer, its KV group and its place in it."""
    by_layer = {
        layer: (number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)
    }
    return [by_layer[layer] for layer in range(len(by_layer))]
