"""Grammars in the engine: outputs obey them, and a bad one ends its own request only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rose_dist.engine.protocol import Generate, SamplingParams
from tests.checkpoints import random_prompt, write_tiny
from tests.engine.test_engine import Runner, greedy

STOP = 499


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a vocabulary of single bytes."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def constrained(name: str, grammar: str, **sampling: float) -> Generate:
    return Generate(
        request_id=name,
        prompt=random_prompt(9, 1),
        sampling=SamplingParams(seed=4, **sampling),  # type: ignore[arg-type]
        max_tokens=60,
        stop_ids=[STOP],
        grammar=grammar,
    )


def with_stop(pattern: str) -> str:
    lark = f'%llguidance {{"no_forcing": true}}\nstart: text <[{STOP}]>\ntext: /{pattern}/'
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_match_their_grammar_and_others_are_free(spelling: Path, overlap: bool) -> None:
    """With `overlap`, masks are of tokens that were read after the step's forward pass began."""
    runner = Runner(spelling, overlap=overlap)
    requests = [
        constrained("digits", with_stop("[0-9]{3}-[0-9]{2}"), temperature=0),
        constrained("word", with_stop("(yes|no)"), temperature=1.5),
        greedy("free", random_prompt(20, 2), 12),
    ]
    found = runner.tokens(requests)
    text = {name: spell(spelling, tokens) for name, tokens in found.items() if name != "free"}
    assert found["digits"][-1] == found["word"][-1] == STOP
    assert [part.isdigit() for part in text["digits"].split("-")] == [True, True]
    assert len(text["digits"]) == 6
    assert text["word"] in ("yes", "no")
    assert found["free"] == runner.tokens([requests[2]])["free"]


def test_a_grammar_that_is_invalid_ends_its_request_only(spelling: Path) -> None:
    runner = Runner(spelling)
    outputs = runner.run([constrained("bad", "{"), greedy("good", random_prompt(5, 2), 3)])
    assert outputs["bad"][-1].finish == "error"
    assert outputs["bad"][-1].error
    assert sum(len(output.token_ids) for output in outputs["good"]) == 3


def test_a_vocabulary_that_is_missing_is_named(tmp_path: Path) -> None:
    runner = Runner(write_tiny(tmp_path))
    (output,) = runner.run([constrained("r", with_stop("a"))])["r"]
    assert output.finish == "error"
    assert "tokenizer.json" in (output.error or "")


def spell(folder: Path, tokens: list[int]) -> str:
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(vocabulary.decode([token for token in tokens if token != STOP]))
