"""Sampling fields that every generating endpoint takes, with the ranges of `engine.protocol.SamplingParams`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.frontend.errors import BadRequestError

MAX_CHOICES = 128
"""Of one request: prompts × n."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


def refuse_unsupported(unsupported: dict[str, tuple[object, str]]) -> None:
    """For fields that, left out of account, would make an answer that was not asked for.

    Args:
        unsupported: each one's value, and what to do instead.

    Raises:
        BadRequestError: one is set.
    """
    for field, (value, instead) in unsupported.items():
        if value:
            raise BadRequestError(f"{field} is not supported; {instead}", param=field)


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the request structs. Fields that OpenAI lacks are named as vLLM names them."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit_field(self) -> str:
        """The field that says how long an answer may be."""
        return "max_tokens"

    def token_limit(self) -> int | None:
        limit: int | None = getattr(self, self.limit_field)
        return limit

    def stop_strings(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise BadRequestError(
                f"stop: at most {MAX_STOP_STRINGS} strings are allowed, not {len(stops)}", param="stop"
            )
        if any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise BadRequestError(f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
        return stops

    def sampling(self, *, vocab_size: int, logprobs: int | None) -> SamplingParams:
        """
        Raises:
            BadRequestError: a token id of `logit_bias` or `stop_token_ids` is outside the vocabulary.
        """
        for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids or ():
                if not 0 <= token_id < vocab_size:
                    raise BadRequestError(
                        f"{field}: {token_id} is not a token id; ids are 0 to {vocab_size - 1}", param=field
                    )
        given = {
            "temperature": self.temperature,
            "top_k": max(self.top_k, 0) if self.top_k is not None else None,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "logprobs": logprobs,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        stop_ids: list[int],
        choice: int,
        grammar: str | None = None,
    ) -> Generate:
        """The engine's request for choice number `choice`; with a seed, each choice has its own."""
        if sampling.seed is not None and choice > 0:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice + 2**63) % 2**64 - 2**63)
        return Generate(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            max_tokens=self.token_limit(),
            stop_ids=stop_ids,
            min_tokens=self.min_tokens,
            grammar=grammar,
        )
