"""What the frontend and the engine say to each other: msgpack structs over ZMQ.

A frontend connects a DEALER socket to the ROUTER of each data-parallel leader. It sends `ToEngine` messages and
receives `ToFrontend` messages; token ids cross, never text. This file imports nothing of either side.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "overloaded", "error"]
"""Why a request ended. `stop`: a stop id was sampled (it is the last id delivered). `length`: `max_tokens` or the
context is used up. `cancelled`: the frontend asked. `overloaded`: the waiting queue was full, nothing was generated.
`error`: `Output.error` says what was wrong."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The frontend has validated every field against the ranges given here."""

    temperature: float = 1.0
    """≥ 0; 0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest; 0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """In [0, 1]; keep tokens at least this share as likely as the likeliest; 0 keeps all."""
    presence_penalty: float = 0.0
    """In [−2, 2]; subtracted once from the logit of each token generated so far."""
    frequency_penalty: float = 0.0
    """In [−2, 2]; subtracted from a token's logit once for each time it was generated."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of tokens in the prompt or the output."""
    logit_bias: dict[int, float] = {}
    """Token id to a value added to its logit."""
    seed: int | None = None
    """Same seed and prompt, same output, whatever else runs; None draws one."""
    logprobs: int | None = None
    """None: no log probabilities. k ≥ 0: the sampled token's and the k likeliest tokens', of the unmodified
    distribution (before temperature and penalties)."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Start one request. Several choices (`n`) are several requests."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    """Most tokens to generate, > 0; None: whatever the context and the KV cache leave room for."""
    stop_ids: list[int] = []
    """Token ids that end the output; empty never stops before `max_tokens`."""
    min_tokens: int = 0
    """Stop ids can't be sampled before this many tokens."""
    grammar: str | None = None
    """What the output must match from its first token on: a grammar for llguidance in its JSON form, with the option
    `no_forcing`, the stop id at its end included. Tokens outside it can't be sampled."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request and free its blocks. Unknown ids are ignored: it may have finished meanwhile."""

    request_id: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A frontend's first message on a connection; the leader answers `Ready` once the model is loaded. After a lost
    connection it voids what the frontend had asked for before.
    """


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The frontend has drained; every rank leaves its step loop."""


class Rebalance(msgspec.Struct, frozen=True, tag="rebalance"):
    """Rearrange the experts over the ranks by the load seen, before the next step."""


ToEngine = Generate | Cancel | Hello | Shutdown | Rebalance


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one output position."""

    logprob: float
    """Of the sampled token."""
    top: list[tuple[int, float]]
    """The likeliest tokens, best first: (token id, log probability)."""


class Output(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step produced for one request. Every generated token is delivered exactly once, in order."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token of `token_ids`, when the request asked for them."""
    finish: FinishReason | None = None
    """Set on the request's last message."""
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache; set, as the next two, on the request's first message with tokens."""
    queue_s: float = 0.0
    """Seconds from the request's arrival to the plan of its first step, with the compilation of its grammar."""
    prefill_s: float = 0.0
    """Seconds from there to its first token."""


class EngineStats(msgspec.Struct, kw_only=True):
    """A leader's gauges and running totals since start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    """Blocks held by running requests; cached blocks that nobody holds count as free."""
    kv_blocks_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    steps: int = 0
    step_tokens: int = 0
    """Tokens that went through the model, prefill and decode."""
    rows_sent: int = 0
    """Rows that this rank sent to experts of other ranks; brought up to date as `expert_load` is."""
    expert_load: list[int] = []
    """By expert, how often this leader's tokens chose it, all layers together; brought up to date every 2 s."""
    expert_balance: float = 1.0
    """How evenly this leader's tokens load the ranks, over all of its time: mean / busiest rank; 1 is even."""
    expert_rebalances: int = 0
    expert_bytes_moved: int = 0
    """Bytes of weights that came to this rank in them."""


class Outputs(msgspec.Struct, kw_only=True, tag="outputs"):
    """One step of one leader: the outputs for the frontend addressed, and the leader's gauges."""

    outputs: list[Output]
    stats: EngineStats


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A leader's answer to `Hello`."""

    dp_rank: int
    dp_size: int
    max_context: int
    """Most tokens of prompt plus output that the model takes."""
    kv_capacity: int
    """Most tokens of one request that this leader's KV cache can hold."""
    max_running: int
    max_waiting: int
    layout: str
    """For people, e.g. `tp1 dp2 ep2`."""


ToFrontend = Outputs | Ready
