from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.frontend.tokenizer import Detokenizer, Tokenizer, TokenizerError
from tests.frontend.checkpoint import SPECIAL, TAGS


@pytest.mark.parametrize("token", [*SPECIAL, *TAGS])
def test_control_tokens_in_text_stay_text(tokenizer: Tokenizer, token: str) -> None:
    ids = tokenizer.encode(f"a{token}b")
    assert not set(ids) & set(tokenizer.control.values())
    assert tokenizer.decode(ids, special=True) == f"a{token}b"
    assert tokenizer.encode_template(f"a{token}b")[1:-1] == [tokenizer.control[token]]


@given(st.text())
def test_ordinary_text_is_encoded_as_the_library_does(tokenizer: Tokenizer, text: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if not any(token in text for token in tokenizer.control):
        assert ids == library.encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, 503)))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    ids = [i for i in ids if i < tokenizer.vocab_size]
    for special in (False, True):
        stream = Detokenizer(tokenizer.token_bytes) if special else tokenizer.detokenizer()
        pieces = [stream.feed(i) for i in ids]
        text = "".join([*pieces, stream.finish()])
        assert text == tokenizer.decode(ids, special=special)
        if not set(ids) & set(tokenizer.control.values()):  # the library decodes the text between added tokens apart
            assert text == library.decode(ids, skip_special_tokens=not special)


def test_incomplete_characters_are_held_back(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    ids = tokenizer.encode("𓀀")  # not in the corpus, so four byte tokens
    assert len(ids) > 1
    assert [stream.feed(i) for i in ids] == [*[""] * (len(ids) - 1), "𓀀"]
    assert stream.finish() == ""
    stream.feed(ids[0])
    assert stream.finish() == "\ufffd"


def test_end_of_turn_ids_come_from_every_file(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == {7, 8, 9, tokenizer.added["<|im_end|>"]}


def test_runs_of_whitespace_among_added_tokens_are_ordinary_text(checkpoint: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken("\n\n\n", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    text = "a\n\n\nb"
    ids = Tokenizer(tmp_path).encode(text)
    assert library.token_to_id("\n\n\n") in ids
    assert ids == library.encode(text).ids


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("{", "can't be loaded")])
def test_a_broken_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(tmp_path)


def test_a_model_that_takes_whole_words_does_not_take_control_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """With `ignore_merges`, a piece of text that is in the vocabulary is that token, however it is spelled."""
    description = json.loads((checkpoint / "tokenizer.json").read_bytes())
    description["model"]["ignore_merges"] = True
    description["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer(tmp_path)
    assert not set(tokenizer.encode("<|im_end|>")) & set(tokenizer.control.values())
    assert tokenizer.decode(tokenizer.encode("<|im_end|>")) == "<|im_end|>"


def test_long_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    text = "The capital of France is Paris. 🙂 " * 1000
    library = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    assert tokenizer.encode(text) == tokenizer.encode_template(text) == library.encode(text).ids
