"""Completions: requests, answers and streamed chunks in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.schema.common import Usage
from rose_dist.frontend.schema.sampling import MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationFields, TokenId


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    def token_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this endpoint

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt: a text, or token ids.

        Raises:
            BadRequestError: texts and ids are mixed, a prompt is empty, there are too many, or an unsupported field is
                set.
        """
        self._check_unsupported()
        prompt = self.prompt
        if isinstance(prompt, str):
            prompts: list[str | list[int]] = [prompt]
        elif all(isinstance(item, int) for item in prompt):
            prompts = [prompt]  # type: ignore[list-item]
        elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
            prompts = prompt  # type: ignore[assignment]
        else:
            raise BadRequestError(
                "prompt: allowed are a string, a list of strings, a list of token ids, and a list of lists of token "
                "ids, but not a mixture",
                param="prompt",
            )
        if not all(prompts):
            raise BadRequestError("prompt: a prompt must have at least one token", param="prompt")
        if (count := len(prompts) * self.choices) > MAX_CHOICES:
            raise BadRequestError(
                f"n: {count} choices (prompts × n) were asked for; at most {MAX_CHOICES} are allowed", param="n"
            )
        return prompts

    def _check_unsupported(self) -> None:
        if self.echo and self.logprobs is not None:
            raise BadRequestError("echo can't be combined with logprobs on this server", param="echo")
        if self.best_of is not None and self.best_of != self.choices:
            raise BadRequestError("best_of is not supported; allowed: the value of n", param="best_of")
        if self.suffix:
            raise BadRequestError("suffix is not supported", param="suffix")


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, and each chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
