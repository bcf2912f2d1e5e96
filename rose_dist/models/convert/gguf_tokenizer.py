"""A byte-level BPE tokenizer from a GGUF file, as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rose_dist.models.checkpoint import CheckpointError

_CONTROL = 3  # GGUF's token type of special tokens

Field = Callable[[str], Any]
"""Value of a GGUF metadata key."""


def tokenizer_from_gguf(field: Field) -> Tokenizer:
    """Build the tokenizer of a file whose pre-tokenizer is `smollm`.

    Digits stand alone, before GPT-2's rule splits the rest; so a run of spaces before a digit is one token, as the
    model was trained, and not as readers split it that ignore GGUF's `tokenizer.ggml.pre`.
    """
    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the GGUF file's tokenizer is {kind[0]}/{kind[1]}; only gpt2/smollm can be converted")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config_from_gguf(field: Field) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens' roles and the chat template."""
    tokens = field("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": field("llama.context_length"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokens[field(f"tokenizer.ggml.{key}_token_id")] for role, key in roles.items()},
        "chat_template": field("tokenizer.chat_template"),
    }
