"""Parts that several endpoints' answers share."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, *, cached: int, reasoning: int = 0) -> Usage:
        return cls(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(cached),
            CompletionTokensDetails(reasoning),
        )


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "rose_dist"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"
