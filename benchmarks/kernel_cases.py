"""What `kernels.py` times: every kernel on its shapes, the least traffic of each, and its peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import kernel_variants, row_copies
from benchmarks.graphs import Call
from benchmarks.kernel_variants import FEW_ROWS, Variant
from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.formats import FORMATS, FP8, MXFP8, NVFP4
from rose_dist.kernels.qk_norm import PagedCache, qk_norm, qk_norm_rope_cache, rotate
from rose_dist.kernels.qk_norm import Rotary as Pairs
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from rose_dist.kernels.routing import Router, Score, route
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu, silu_mul

EPS = 1e-5
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@dataclass
class Case:
    """One kernel on one shape: the call, what it must move, and its peers."""

    kernel: str
    shape: str
    call: Call
    bytes: int = 0
    """Least traffic: every input read and every output written once."""
    peers: dict[str, Call] = field(default_factory=dict)
    compiled: Call | None = None
    """To be wrapped in torch.compile."""
    variants: dict[str, Variant] = field(default_factory=dict)
    """The same kernel in other tilings."""


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(BF16)


def norms(peers: Peers) -> Iterator[Case]:
    for rows, hidden in ((1, 2880), (64, 2880), (64, 7168), (65536, 2880), (32768, 7168), (1 << 20, 128)):
        x, residual, weight = bf16(rows, hidden), bf16(rows, hidden), bf16(hidden)
        size, shape = rows * hidden * 2, f"{rows}x{hidden}"

        def plain(x: Any = x, weight: Any = weight, hidden: int = hidden) -> Any:
            return F.rms_norm(x, (hidden,), weight, EPS)

        def added(x: Any = x, residual: Any = residual, weight: Any = weight, hidden: int = hidden) -> Any:
            total = x + residual
            return F.rms_norm(total, (hidden,), weight, EPS), total

        def floors(kept_bytes: int, residual: Any, x: Any = x, rows: int = rows) -> dict[str, Call]:
            return dict(row_copies.copies(x, kept_bytes, residual)) if rows < FEW_ROWS else {}

        tilings = functools.partial(kernel_variants.norms, rows, hidden)
        yield Case(
            "rms_norm", shape, functools.partial(rms_norm, x, weight, EPS), 2 * size,
            {"torch": plain, **peers.norm(x, weight), **floors(16, None)}, plain,
            tilings(quantized=False, residual=False),
        )  # fmt: skip
        yield Case(
            "add_rms_norm", shape, functools.partial(add_rms_norm, x, residual, weight, EPS), 4 * size,
            {"torch": added, **peers.add_norm(x, residual, weight), **floors(16, residual)}, added,
            tilings(quantized=False, residual=True),
        )  # fmt: skip
        for fmt in (FP8, MXFP8):
            fused = functools.partial(rms_norm_quantized, x, weight, EPS, fmt, residual=residual)

            def apart(x: Any = x, residual: Any = residual, weight: Any = weight, fmt: Any = fmt) -> Any:
                normed, total = add_rms_norm(x, residual, weight, EPS)
                return quantize(normed, fmt), total

            moved = int(3.5 * size) + rows * fmt.blocks(hidden) * fmt.scale.bytes
            yield Case(
                f"add_rms_norm_{fmt}", shape, fused, moved, {"ours apart": apart, **floors(8, residual)},
                variants=tilings(quantized=True, residual=True),
            )  # fmt: skip
        fused = functools.partial(rms_norm_quantized, x, weight, EPS, FP8)
        two = functools.partial(lambda x, weight: quantize(rms_norm(x, weight, EPS), FP8), x, weight)
        moved = int(1.5 * size) + rows * FP8.blocks(hidden) * 4
        yield Case(
            "rms_norm_fp8", shape, fused, moved, {"ours apart": two, **floors(8, None)},
            variants=tilings(quantized=True, residual=False),
        )  # fmt: skip


def qk_norms(peers: Peers) -> Iterator[Case]:
    for tokens, query_heads, key_heads, head_dim in (
        (1, 64, 8, 64), (64, 64, 8, 64), (14564, 64, 8, 64), (58256, 64, 8, 64), (15421, 64, 4, 128),
        (43691, 16, 8, 256),
    ):  # fmt: skip
        heads = query_heads + 2 * key_heads
        fused = bf16(tokens, heads, head_dim)
        q, k, v = fused[:, :query_heads], fused[:, query_heads:-key_heads], fused[:, -key_heads:]
        weight = bf16(head_dim)
        rows = bf16(tokens * (query_heads + key_heads), head_dim)
        cos, sin = (torch.randn(tokens, head_dim // 2, device=CUDA) for _ in range(2))
        positions = torch.randperm(tokens, device=CUDA)
        blocks = -(-tokens // 64)
        slots = torch.randperm(blocks * 64, device=CUDA)[:tokens]
        cache = PagedCache(bf16(blocks, 64, key_heads, head_dim), bf16(blocks, 64, key_heads, head_dim), slots)
        size = tokens * (query_heads + key_heads) * head_dim * 2
        shape = f"{tokens}x({query_heads}+{key_heads})x{head_dim}"

        def generic(rows: Any = rows, weight: Any = weight, head_dim: int = head_dim) -> Any:
            return F.rms_norm(rows, (head_dim,), weight, EPS)

        yield Case(
            "qk_norm", shape, functools.partial(qk_norm, q, k, weight, weight, EPS), 2 * size,
            {"torch": generic, **peers.norm(rows, weight)}, generic,
        )  # fmt: skip
        for norm in ((weight, weight, EPS), None):
            call = functools.partial(qk_norm_rope_cache, q, k, v, cache, cos, sin, positions=positions, norm=norm)

            def apart(
                q: Any = q, k: Any = k, v: Any = v, cache: Any = cache, cos: Any = cos, sin: Any = sin,
                positions: Any = positions, norm: Any = norm, both: Any = fused[:, :-key_heads],
            ) -> None:  # fmt: skip
                if norm:
                    qk_norm(q, k, *norm)
                rotate(both, cos[positions], sin[positions], Pairs.NEOX)
                cache.keys.view(-1, *k.shape[1:]).index_copy_(0, cache.slots, k)
                cache.values.view(-1, *v.shape[1:]).index_copy_(0, cache.slots, v)

            moved = tokens * heads * head_dim * 4 + tokens * head_dim * 4
            name = "qk_norm_rope_cache" if norm else "rope_cache"
            yield Case(name, shape, call, moved, {"ours apart + torch": apart})


def activations(peers: Peers) -> Iterator[Case]:
    for rows, columns in ((4, 2880), (64, 2880), (32768, 2880), (65536, 2048)):
        x, bias = bf16(rows, 2 * columns), bf16(32, 2 * columns)
        which = Rows(experts=torch.arange(rows, device=CUDA, dtype=torch.int32) * 32 // max(rows, 32))
        size, shape = rows * columns * 2, f"{rows}x{columns}"

        def silu(x: Any = x) -> Any:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

        def swiglu(x: Any = x, bias: Any = bias, experts: Any = which.experts) -> Any:
            wide = x + bias[experts]
            gate, linear = wide[:, 0::2].clamp(max=7.0), wide[:, 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(gate * 1.702) * (linear + 1)

        clamped = functools.partial(clamped_swiglu, x, limit=7.0, bias=bias, rows=which)
        yield Case("clamped_swiglu + bias", shape, clamped, 3 * size, {"torch": swiglu}, swiglu)
        plain = functools.partial(silu_mul, x)
        yield Case("silu_mul", shape, plain, 3 * size, {"torch": silu, **peers.silu(x)}, silu)
        for name, gate, one in (
            ("clamped_swiglu + bias", Gate.CLAMPED_SWIGLU, clamped),
            ("silu_mul", Gate.SILU, plain),
        ):
            options = {"limit": 7.0, "bias": bias, "rows": which} if gate is Gate.CLAMPED_SWIGLU else {}
            fused = functools.partial(activate_quantized, gate, x, FP8, **options)
            apart = functools.partial(lambda one: quantize(one(), FP8), one)
            moved = int(2.5 * size) + rows * FP8.blocks(columns) * 4
            yield Case(f"{name} + fp8", shape, fused, moved, {"ours apart": apart})


def quantisers(peers: Peers) -> Iterator[Case]:
    for rows, columns in ((64, 2880), (65536, 2880), (32768, 7168)):
        x, shape = bf16(rows, columns), f"{rows}x{columns}"
        for fmt in FORMATS.values():
            scale = torch.ones(1, device=CUDA) if fmt is NVFP4 else None
            codes, scales = quantize(x, fmt, global_scale=scale)
            moved = rows * columns * 2 + codes.nbytes + scales.nbytes

            def torch_fp8(x: Any = x, columns: int = columns) -> Any:
                blocks = F.pad(x, (0, -columns % 128)).view(x.shape[0], -1, 128).float()
                scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
                return (blocks / scales[..., None]).to(torch.float8_e4m3fn), scales

            call = functools.partial(quantize, x, fmt, global_scale=scale)
            yield Case(f"quantize {fmt}", shape, call, moved, {}, torch_fp8 if fmt is FP8 else None)
            call = functools.partial(dequantize, codes, scales, fmt, global_scale=scale)
            yield Case(f"dequantize {fmt}", shape, call, moved)


def routers(peers: Peers) -> Iterator[Case]:
    for experts, router, bias in (
        (128, Router(4), None),
        (256, Router(8, Score.SIGMOID, groups=8, top_groups=4, scale=2.5), torch.randn(256, device=CUDA)),
        (256, Router(8), None),
    ):
        for tokens in (1, 8, 32, 64, 128, 4096):
            logits = torch.randn(tokens, experts, device=CUDA)
            if bias is None:
                logits = logits.to(BF16)

            def topk(logits: Any = logits, k: int = router.k) -> Any:
                values, ids = logits.topk(k)
                return ids, values.softmax(-1)

            for counts in (False, True):
                call = functools.partial(route, logits, router, bias=bias, counts=counts)
                name = f"route {router.score.value}{' + counts' if counts else ''}"
                same = {"torch (top-k, softmax)": topk} if router.score is not Score.SIGMOID and not counts else {}
                yield Case(
                    name, f"{tokens}x{experts} top {router.k}", call, 0, same, topk if same else None,
                    kernel_variants.routers(tokens, counts=counts),
                )  # fmt: skip


def embeddings(peers: Peers) -> Iterator[Case]:
    for tokens, hidden in ((1, 2880), (64, 2880), (65536, 2880)):
        table, ids = bf16(201088, hidden), torch.randint(201088, (tokens,), device=CUDA)
        cos, sin = torch.randn(2, 131072, 32, device=CUDA)
        positions = torch.randint(131072, (tokens,), device=CUDA)
        call = functools.partial(embed_with_angles, ids, positions, table, cos, sin)

        def plain(
            ids: Any = ids, positions: Any = positions, table: Any = table, cos: Any = cos, sin: Any = sin
        ) -> Any:
            return F.embedding(ids, table), cos[positions], sin[positions]

        moved = 2 * tokens * (hidden * 2 + 2 * 32 * 4)
        yield Case("embed_with_angles", f"{tokens}x{hidden}", call, moved, {"torch": plain})


class Peers:
    """Kernels of other libraries, where they can be loaded."""

    def __init__(self, flashinfer: str | None) -> None:
        self.found: list[str] = []
        self._norm = self._silu = self._quack = None
        if flashinfer:
            try:
                import tvm_ffi  # noqa: PLC0415

                self._norm = tvm_ffi.load_module(f"{flashinfer}/fi_norm.so")
                self._silu = tvm_ffi.load_module(f"{flashinfer}/fi_silu.so")
                self.found.append("FlashInfer 0.7.2.post1")
            except Exception as error:
                print("no FlashInfer:", error)
        try:
            from quack.rmsnorm import rmsnorm_fwd  # noqa: PLC0415

            self._quack = rmsnorm_fwd
            self.found.append("quack 0.6.5")
        except Exception as error:
            print("no quack:", error)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        if self._norm:
            module = self._norm

            def flashinfer() -> torch.Tensor:
                out = torch.empty_like(x)
                module["rmsnorm"](out, x, weight, EPS, True)
                return out

            calls["FlashInfer"] = flashinfer
        if self._quack:
            calls["quack"] = functools.partial(self._quack, x, weight, eps=EPS)
        return calls

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        if self._norm:
            y, other = x.clone(), residual.clone()
            calls["FlashInfer"] = functools.partial(self._norm["fused_add_rmsnorm"], y, other, weight, EPS, True)
        if self._quack:
            calls["quack"] = functools.partial(self._quack, x, weight, residual=residual, eps=EPS)
        return calls

    def silu(self, x: torch.Tensor) -> dict[str, Call]:
        if not self._silu:
            return {}
        module = self._silu

        def flashinfer() -> torch.Tensor:
            out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
            module["silu_and_mul"](out, x, True)
            return out

        return {"FlashInfer": flashinfer}


SECTIONS: dict[str, Callable[[Peers], Iterator[Case]]] = {
    section.__name__: section for section in (norms, qk_norms, activations, quantisers, routers, embeddings)
}
