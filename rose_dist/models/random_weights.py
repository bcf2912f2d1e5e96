"""Random weights of true shape, made where the model is: for benchmarks, which need no values that mean something."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from rose_dist.kernels.fp8_experts import BLOCK as FP8_BLOCK
from rose_dist.kernels.mxfp4 import BLOCK, MAGNITUDES, SCALE_BIAS
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, EXPONENT_BIAS
from rose_dist.layers.expert_matrices import PackedMatrix

_FP8_CODES_STD = 64.0
"""So that no code of a normal distribution reaches the largest, 448."""
_ATTENTION_SHARE = 0.25
"""By how much smaller than others' the results of attention are."""
_RMS_OF_UNIFORM_CODES = math.sqrt(sum(m * m for m in MAGNITUDES) / 8)


@torch.inference_mode()
def fill_randomly(model: nn.Module, seed: int = 0) -> None:
    """Every parameter from `seed` and its name alone.

    A product of unit inputs has unit variance, norms scale by 1 and the router has no bias: activations stay finite.

    Tokens spread evenly over the experts, in every layer, because hardly anything in them is common to all. That holds
    only as long as every value's mean is 0 (SwiGLU's results have a mean, which matrices that are not symmetric about 0
    would hand to all tokens alike, layer by layer the same) and as attention adds little: it averages what differs
    between a prompt's tokens away and keeps what is common, and its bias is the same for all.
    """
    for name, parameter in model.named_parameters():
        # A CPU's generator takes 32 bits of its seed.
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        _fill(name, parameter, generator)
    for module in model.modules():
        if isinstance(module, PackedMatrix):
            for expert in range(module.packed.experts):
                module.packed.find_tops(expert)


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith("router.bias"):
        parameter.zero_()
    elif name.endswith("o_proj.bias"):
        parameter.normal_(std=0.1 * _ATTENTION_SHARE, generator=generator)
    elif name.endswith("o_proj.weight"):
        parameter.normal_(std=_ATTENTION_SHARE * parameter.shape[-1] ** -0.5, generator=generator)
    elif name.endswith(("bias", "_bias")):
        parameter.normal_(std=0.1, generator=generator)
    elif name.endswith("proj.data"):
        _fill_packed(parameter, generator)
    elif name.endswith("rescale"):
        parameter.fill_(1.0)
    elif name.endswith("proj.tops"):
        pass  # they follow from the data
    elif name.endswith("proj.codes"):
        _fill_fp8(parameter, generator)
    elif name.endswith("proj.scales"):
        parameter.fill_(1 / (_FP8_CODES_STD * math.sqrt(parameter.shape[-1] * FP8_BLOCK)))
    elif name.endswith(("embed_tokens.weight", "sinks")):
        parameter.normal_(generator=generator)
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def _fill_packed(data: Tensor, generator: torch.Generator) -> None:
    """Uniform codes, and scales within a factor of 2 of what makes an output of unit inputs have unit variance."""
    inputs = data.shape[2] * BLOCK
    middle = round(math.log2(1 / (math.sqrt(inputs) * _RMS_OF_UNIFORM_CODES))) + EXPONENT_BIAS + SCALE_BIAS
    for expert in data:
        # Without a range the highest bit stays 0, which is a sign's: one code in 16 would never be negative.
        expert.view(torch.int64).random_(torch.iinfo(torch.int64).min, None, generator=generator)
        expert[..., CODE_BYTES:].random_(middle - 1, middle + 2, generator=generator)


def _fill_fp8(codes: Tensor, generator: torch.Generator) -> None:
    """Normally distributed, one expert at a time."""
    for expert in codes:
        normal = torch.empty(expert.shape, device=codes.device).normal_(std=_FP8_CODES_STD, generator=generator)
        expert.copy_(normal.to(torch.float8_e4m3fn).view(torch.uint8))
