"""A tiny GPT-OSS checkpoint with Harmony's whole vocabulary that knows `script.py` by heart.

It is trained on the rendered lessons until every token of its replies is all but certain, whatever the date in the
system message and the number of the ticket. Only the ids that occur are trained. The others have zero rows in the
embedding and the output head, so their logits are 0; the training softmax counts them, which makes the margin hold over
the full vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from datetime import date, timedelta
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from rose_dist.frontend.formats.harmony_render import render
from rose_dist.frontend.formats.harmony_vocabulary import CALL, END_OF_TEXT, RETURN, SIZE, HarmonyVocabulary
from tests.serve.script import lessons

STEPS = 120
LEARNING_RATE = 1e-2
HEAD_LEARNING_RATE = 3e-2
MOST_LOSS = 0.1
"""Nats of the worst reply token: its probability is 0.9 or more; of most it is above 0.999."""

Lesson = tuple[list[int], list[bool]]
"""Ids of a conversation with its replies, and which of them are the replies'."""


def scripted_model(folder: Path) -> Path:
    """`folder`, with the checkpoint in it; one that was made from the same inputs is kept."""
    key = _key()
    stamp = folder / "key"
    if not stamp.exists() or stamp.read_text() != key:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name))
        threads = torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # with several, sums differ from run to run, and models in what they don't know by heart
        try:
            _train(fresh)
        finally:
            torch.set_num_threads(threads)
        (fresh / "key").write_text(key)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)
    return folder


def _key() -> str:
    inputs = [Path(__file__).read_text(), torch.__version__, transformers.__version__, _lessons(random.Random(0), 1)]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _lessons(draw: random.Random, variants: int) -> list[list[Lesson]]:
    """The lessons on several dates, with several tickets."""
    vocabulary = HarmonyVocabulary.find()
    dates = [date(2024, 1, 1) + timedelta(draw.randrange(20 * 365)) for _ in range(variants)]
    return [_merged(vocabulary, today, draw.randrange(100, 1000)) for today in dates]


def _merged(vocabulary: HarmonyVocabulary, today: date, ticket: int) -> list[Lesson]:
    """A lesson that begins another, as each turn of a tool loop begins the next, is part of that one."""
    merged: list[Lesson] = []
    for conversation, reply in reversed(lessons(ticket)):
        prompt = render(conversation, vocabulary, today)
        sampled = vocabulary.encode_with_control(reply)
        ids, learnt = prompt + sampled, [False] * len(prompt) + [True] * len(sampled)
        longer = next((known for known in merged if known[0][: len(ids)] == ids), None)
        if longer is None:
            merged.append((ids, learnt))
        else:
            longer[1][len(prompt) : len(ids)] = learnt[len(prompt) :]
    return merged


def _train(folder: Path) -> None:
    variants = _lessons(random.Random(0), STEPS)
    used = sorted({token for lessons in variants for ids, _ in lessons for token in ids})
    place = {token: number for number, token in enumerate(used)}
    batches = [_batch(lessons, place) for lessons in variants]
    torch.manual_seed(0)
    model = GptOssForCausalLM(_config(len(used))).float()
    optimizer = torch.optim.Adam([{"params": model.model.parameters()}, {"params": model.lm_head.parameters()}])
    rates = [LEARNING_RATE, HEAD_LEARNING_RATE]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS, pct_start=0.1)
    for ids, learnt in batches:
        losses = _losses(model, ids, learnt, unused=SIZE - len(used))
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert losses.max() < MOST_LOSS, f"the model has not learnt its script: {losses.max()}"
    _write(model, used, folder)


def _batch(lessons: list[Lesson], place: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Places of the ids among the used ones, int64 [lessons, tokens], padded at the end; and which are learnt."""
    ids = [torch.tensor([place[token] for token in ids]) for ids, _ in lessons]
    learnt = [torch.tensor(flags) for _, flags in lessons]
    return torch.nn.utils.rnn.pad_sequence(ids, True), torch.nn.utils.rnn.pad_sequence(learnt, True)


def _losses(model: GptOssForCausalLM, ids: Tensor, learnt: Tensor, *, unused: int) -> Tensor:
    """Nats of each learnt token, where `unused` more tokens have logit 0."""
    states = model.model(input_ids=ids[:, :-1]).last_hidden_state[learnt[:, 1:]]
    logits = model.lm_head(states)
    others = logits.new_full((len(logits), 1), math.log(unused))
    return torch.nn.functional.cross_entropy(torch.cat([logits, others], 1), ids[learnt], reduction="none")


def _config(vocab_size: int) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )


def _write(model: GptOssForCausalLM, used: list[int], folder: Path) -> None:
    """Save with the whole vocabulary."""
    for layer in (model.model.embed_tokens, model.lm_head):
        rows = torch.zeros(SIZE, layer.weight.shape[1])
        rows[used] = layer.weight.detach()
        layer.weight = torch.nn.Parameter(rows)
    model.config.vocab_size = SIZE
    model.config.pad_token_id = END_OF_TEXT
    model.config.eos_token_id = model.generation_config.eos_token_id = [RETURN, CALL]
    model.save_pretrained(folder)
