"""Tiny random GPT-OSS checkpoints, written by transformers, and its logits for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def write_tiny(folder: Path, seed: int = 0, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> Path:
    """4 layers, 8 query and 4 key heads, 8 experts of which 3 are chosen; window 128 as in the real models."""
    config = GptOssConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_dim,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=128,
        max_position_embeddings=8192,
        rope_parameters=YARN,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = GptOssForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            # Large enough that neighbouring tokens and wrong experts make a difference.
            torch.nn.init.normal_(weight, std=0.15 if weight.dim() > 1 and "bias" not in name else 0.5)
    model.to(dtype).save_pretrained(folder)
    return folder


@cache
def reference(folder: Path) -> GptOssForCausalLM:
    return GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    """fp32 [tokens, vocabulary]."""
    with torch.inference_mode():
        return reference(folder)(torch.tensor([prompt])).logits[0]


def reference_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = reference(folder).generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids)
        )
    return output[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int, vocab_size: int = 500) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
