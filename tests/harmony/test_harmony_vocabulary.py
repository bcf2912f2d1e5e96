"""The vocabulary without a network: the variable, the cache, a checkpoint's tokenizer.json, an installed package."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rose_dist.frontend.formats.choose import choose_format, load_codec
from rose_dist.frontend.formats.harmony_vocabulary import CONTROL_TEXT, SIZE, HarmonyVocabulary
from rose_dist.frontend.tokenizer import TokenizerError
from rose_dist.vocabulary import (
    FILE_NAME,
    SHA256,
    VARIABLE,
    VocabularyError,
    checkpoint_token_bytes,
    find_ranks_file,
    load_token_bytes,
)


def _byte_alphabet() -> list[str]:
    """As GPT-2 defines it, by its own loop."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet, extra = [""] * 256, 0
    for byte in range(256):
        alphabet[byte] = chr(byte) if byte in keep else chr(256 + extra)
        extra += byte not in keep
    return alphabet


@pytest.fixture(scope="module")
def checkpoint(vocabulary, tmp_path_factory):
    """A directory with a tokenizer.json as gpt-oss checkpoints have it."""
    alphabet = _byte_alphabet()
    entries = {"".join(alphabet[byte] for byte in text): i for i, text in enumerate(vocabulary.token_bytes)}
    added = [{"id": token_id, "content": text, "special": True} for token_id, text in CONTROL_TEXT.items()]
    added.append({"id": 200_020, "content": "<plain>", "special": False})
    tokenizer = {"decoder": {"type": "ByteLevel"}, "added_tokens": added, "model": {"vocab": entries}}
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture
def no_sources(monkeypatch, tmp_path):
    """Neither variable nor cache nor package."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path


def test_bytes_of_a_tokenizer_json(vocabulary, checkpoint):
    token_bytes = load_token_bytes(checkpoint / "tokenizer.json")
    assert token_bytes[: len(vocabulary.token_bytes)] == vocabulary.token_bytes
    assert {token_bytes[token_id] for token_id in CONTROL_TEXT} == {b""}
    assert token_bytes[200_020] == b"<plain>"


def test_rebuilt_from_a_checkpoint(no_sources, checkpoint):
    path = find_ranks_file(checkpoint)
    assert path == no_sources / "cache" / "rose" / FILE_NAME
    assert find_ranks_file() == path, "the second time the cache serves"


def test_from_the_installed_package(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_ranks_file().parent == tmp_path / "rose"


def test_nothing_found_names_the_variable(no_sources, tmp_path):
    with pytest.raises(VocabularyError, match=f"{VARIABLE}.*{FILE_NAME}.*bpe-openai"):
        find_ranks_file(tmp_path)


def test_wrong_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / FILE_NAME).write_text("IQ== 0\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(VocabularyError, match=f"{SHA256}.*another file"):
        find_ranks_file()


def test_another_models_tokenizer_does_not_serve(no_sources, tmp_path):
    tokenizer = {"decoder": {"type": "ByteLevel"}, "added_tokens": [], "model": {"vocab": {"a": 0}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyError, match=VARIABLE):
        find_ranks_file(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"decoder": {"type": "Metaspace"}, "model": {}, "added_tokens": []}'])
def test_unreadable_tokenizer(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        load_token_bytes(path)


def test_missing_file(tmp_path):
    with pytest.raises(VocabularyError, match="No such file"):
        load_token_bytes(tmp_path / "nothing.tiktoken")


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    HarmonyVocabulary.find()
    assert find_ranks_file().name == FILE_NAME


def test_control_ids(vocabulary, library):
    for token_id, text in CONTROL_TEXT.items():
        assert library.encode(text, allowed_special="all") == [token_id] == vocabulary.encode_with_control(text)
        assert token_id not in vocabulary.encode(text)
        assert token_id < SIZE


@settings(max_examples=300)
@given(st.text())
def test_encode_and_decode(vocabulary, library, text):
    ids = vocabulary.encode(text)
    assert ids == library.encode(text, disallowed_special=())
    assert vocabulary.decode(ids) == text
    assert b"".join(map(vocabulary.bytes_of, ids)) == text.encode()


def test_long_runs_are_cut_and_other_text_is_not(vocabulary, library):
    prose = "The quick brown fox jumps over 13 lazy dogs. " * 300
    assert vocabulary.encode(prose) == library.encode(prose)
    letters = "abcdefghijklmnopqrstuvwxyz" * 300
    assert vocabulary.encode(f"x {letters}") == [
        *library.encode(f"x {letters[:1024]}"),
        *(token for cut in range(1024, len(letters), 1024) for token in library.encode(letters[cut : cut + 1024])),
    ]
    for text in ("a" * 10_000, " " * 10_000, "東" * 9_000 + " x"):
        assert vocabulary.decode(vocabulary.encode(text)) == text


PARTS = ["word", "Wörter", "हिन्दी", "東京", "don't", "1234567", "3.14", "::=/", '"{', "🙂"]
SPACES = [" ", "  ", "\n", "\r\n\t", "/\n", "\u3000"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from([*PARTS, *SPACES]), min_size=1), st.integers(0, 400))
def test_a_long_text_in_pieces_is_the_text_in_one(vocabulary, library, parts, shift):
    """Whatever stands at the places where it is cut."""
    text = "x" * shift + "".join([*parts, " ", *reversed(parts)] * (20_000 // len("".join(parts)) + 1))
    longest_run = max(len(run) for run in re.split(r"\s+", text) + re.findall(r"\s+", text))
    assume(longest_run <= 1024)
    assert vocabulary.encode(text) == library.encode(text, disallowed_special=())


def test_a_checkpoint_in_openai_s_layout_has_harmony_s_bytes(tmp_path):
    assert checkpoint_token_bytes(tmp_path, SIZE) == load_token_bytes(find_ranks_file())
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        checkpoint_token_bytes(tmp_path, SIZE - 1)


def test_a_model_known_by_name_alone_speaks_harmony(tmp_path):
    codec = load_codec(Path("gpt-oss-20b"))
    assert codec.decode(codec.encode("Rose")) == "Rose"
    assert type(choose_format("auto", codec)).__name__ == "HarmonyFormat"
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_codec(tmp_path / "another")
