"""One rank's engine: what it does in every step, together with its peers."""

from __future__ import annotations

import enum
import time
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from rose_dist.comm.world import Groups
from rose_dist.engine.compile_worker import CompileWorker
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.expert_balancer import ExpertBalancer
from rose_dist.engine.grammar import GrammarCompiler, TokenGrammar
from rose_dist.engine.kv_cache import KVCache
from rose_dist.engine.kv_groups import fit_kv
from rose_dist.engine.mask_worker import Masks, MaskWorker
from rose_dist.engine.protocol import Generate, Output, Ready
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.sampler import Drawn, Sampler
from rose_dist.engine.scheduler import Delivery, Plan, Scheduler
from rose_dist.engine.step import Step
from rose_dist.engine.transfer import ToHost
from rose_dist.kernels import mxfp4_e4m3
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.checkpoint import Progress
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.loader import load_model, random_model
from rose_dist.vocabulary import checkpoint_token_bytes

LOAD_SECONDS = 2.0
"""How often the experts' load is read while the engine works."""


class Outcome(enum.Enum):
    """What the ranks of a lockstep group found together.

    IDLE: no rank has work. STOPPED: besides, all leaders want to end.
    """

    WORKED = enum.auto()
    IDLE = enum.auto()
    STOPPED = enum.auto()


class Engine:
    """The model on this rank and, on the leader of a data-parallel replica, its scheduler.

    Ranks that share experts or heads step together: `step` is collective over the lockstep group.
    """

    def __init__(self, config: EngineConfig, groups: Groups, model: GptOssForCausalLM) -> None:
        self.config = config
        self.groups = groups
        self.leader = groups.tp.rank == 0
        self.runner = ModelRunner(model, config)
        self._sampler = Sampler(self.runner.device_draw)
        self._under_way: tuple[Plan, Drawn] | None = None
        self.max_context = self.runner.max_context
        kv = KVCache(self.runner.specs, config.block_size, config.prefix_cache)
        self.scheduler = Scheduler(config, kv, self.max_context, model.config.vocab_size)
        self.balancer = ExpertBalancer(model, groups)
        self.rebalance_wanted = False
        """A leader's wish; the next step fulfils it on all ranks of the lockstep group."""
        self._load: tuple[ToHost, ToHost] | None = None
        """On their way: what experts were chosen how often, and how many rows were sent."""
        self._load_told = 0.0
        self.compiles = CompileWorker(self._make_compiler)
        self._mask_worker: MaskWorker | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Step)

    @classmethod
    def load(cls, config: EngineConfig, groups: Groups, progress: Progress | None = None) -> Engine:
        """Read the checkpoint's part for this rank, or make random weights, and get ready to step."""
        if config.moe_activations == "fp8":
            mxfp4_e4m3.require(config.device)
        options = BuildOptions(
            groups,
            config.max_step_tokens,
            config.torch_dtype,
            config.device,
            config.moe_weights,
            config.redundant_experts,
            config.moe_activations,
            config.rail_forwarding,
        )
        if config.load_format == "random":
            model = random_model(config.model, options)
        else:
            model = load_model(config.model, options, progress)
        if groups.lockstep.size > 1:  # prefill graphs hold no exchange between ranks
            config = replace(config, prefill_ladder=())
        engine = cls(fit_kv(config, model.kv_groups, model.config, groups), groups, model)
        if config.device.type == "cuda":
            engine.runner.warm_up()
        return engine

    def ready(self) -> Ready:
        return Ready(
            dp_rank=self.groups.place.dp_rank,
            dp_size=self.groups.layout.dp,
            max_context=self.max_context,
            kv_capacity=self.scheduler.kv.capacity,
            max_running=self.config.max_running,
            max_waiting=self.config.max_waiting,
            layout=str(self.groups.layout),
        )

    def submit(self, client: bytes, generate: Generate) -> list[Delivery]:
        """Queue a request on this leader; what is delivered at once is its refusal."""
        request = self.scheduler.add(client, generate)
        if isinstance(request, Output):
            return [(client, request)]
        if generate.grammar is not None:
            request.compiling = True
            self.compiles.start(request, generate.grammar)
        return []

    def cancel(self, client: bytes, request_id: str) -> None:
        """Forget a request, wherever it stands."""
        request = self.scheduler.cancel(client, request_id)
        if request is not None:
            self.compiles.forget(request)

    def cancel_all(self, client: bytes) -> None:
        """Forget all requests of a client."""
        for request in self.scheduler.cancel_all(client):
            self.compiles.forget(request)

    def take_compiled(self, *, wait: bool = False) -> list[Delivery]:
        """Let requests be admitted whose grammars have been compiled; what is delivered are refusals.

        Args:
            wait: until all have been.
        """
        refusals = []
        for request, grammar in self.compiles.take(wait=wait):
            request.compiling = False
            if isinstance(grammar, TokenGrammar):
                request.grammar = grammar
            else:
                self.scheduler.cancel(request.client, request.id)
                refusals.append((request.client, Output(request_id=request.id, finish="error", error=str(grammar))))
        return refusals

    def _make_compiler(self) -> GrammarCompiler:
        """Takes about half a second."""
        vocab_size = self.runner.model.config.vocab_size
        token_bytes = checkpoint_token_bytes(self.config.model, vocab_size)
        # One id more than there are, for the end of text that no output contains.
        compiler = GrammarCompiler(token_bytes, max(vocab_size, len(token_bytes)) + 1)
        self._mask_worker = MaskWorker(compiler)
        return compiler

    @property
    def has_work(self) -> bool:
        """Whether there is anything left to step for on this leader."""
        return self.scheduler.has_work or self._under_way is not None or self.rebalance_wanted

    def step(self, *, stop: bool = False) -> tuple[Outcome, list[Delivery]]:
        """Agree with the peers whether anyone has work and, if so, run one step.

        Args:
            stop: this leader wants to end once nobody has work; ignored on other ranks, which always do.
        """
        plan = self.scheduler.schedule() if self.leader else Plan(Step(), ())
        staying = self.leader and not (stop and not self.scheduler.waiting)
        run, settle, stay, rebalance = self.groups.lockstep.all_reduce_max(
            [bool(plan.step.sequences), self._under_way is not None, staying, self.rebalance_wanted]
        )
        if rebalance:
            self.rebalance_wanted = False
            self.balancer.rebalance()
        if run or settle:
            deliveries = self._run(plan) if run else self._settle()
            self._tell_load(idle=False)
            return Outcome.WORKED, deliveries
        self._tell_load(idle=True)
        if rebalance:
            return Outcome.WORKED, []
        return (Outcome.IDLE if stay else Outcome.STOPPED), []

    def _tell_load(self, *, idle: bool) -> None:
        """Bring what the experts have done into the gauges, now and then and whenever work ends. While there is work
        no step waits for it: one asks for it, and a later one takes it in.
        """
        if not self.leader:
            return
        if idle or (self._load is None and time.monotonic() - self._load_told > LOAD_SECONDS):
            self._load, self._load_told = (self.balancer.load(), self.balancer.rows_sent()), time.monotonic()
        if self._load is None or not (idle or all(one.there for one in self._load)):
            return
        (load, rows_sent), stats = (one.result() for one in self._load), self.scheduler.stats
        self._load = None
        stats.expert_load = load.sum(0).tolist()
        stats.expert_balance = self.balancer.balance(load)
        stats.expert_rebalances = self.balancer.rebalances
        stats.expert_bytes_moved = self.balancer.bytes_received
        stats.rows_sent = int(rows_sent)

    def _run(self, plan: Plan) -> list[Delivery]:
        """With `overlap` the step is launched before the tokens of the one before are read: while the host takes those
        in, the device works. What is sampled goes by the tokens read.
        """
        step = plan.step
        if self.groups.tp.size > 1:
            step = self._decoder.decode(
                self.groups.tp.broadcast_bytes(self._encoder.encode(step) if self.leader else None)
            )
        masks = None if self._under_way else self._start_masks(plan)
        early = self._sampler.early_rules(plan.sampling) if self.leader and self.runner.draws(step) else None
        logits = self.runner.run(step, early)
        deliveries = self._settle()
        if logits is not None:
            masks = masks or self._start_masks(plan)
            drawn = self._sampler.sample(
                logits, plan.sampling, None if masks is None else masks.result(), drawn_early=early is not None
            )
            self.scheduler.launched(plan)
            self._under_way = (plan, drawn)
        if self.config.overlap:
            self.runner.share_sampled()
            return deliveries
        return [*deliveries, *self._settle()]

    def _start_masks(self, plan: Plan) -> Future[Masks] | None:
        return None if self._mask_worker is None else self._mask_worker.start(plan.sampling)

    def _settle(self) -> list[Delivery]:
        """Take in the step under way."""
        if self._under_way is None:
            return []
        plan, drawn = self._under_way
        self._under_way = None
        deliveries = self.scheduler.complete(plan, drawn.result())
        self.runner.model.check()
        return deliveries
