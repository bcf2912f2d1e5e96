"""Which tokenizer and chat format a checkpoint gets."""

from __future__ import annotations

import json
from pathlib import Path

from rose_dist.frontend.config import CHAT_FORMATS
from rose_dist.frontend.formats.base import ChatFormat, FormatError
from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_codec import HarmonyCodec
from rose_dist.frontend.formats.harmony_vocabulary import CHANNEL, SIZE, HarmonyVocabulary
from rose_dist.frontend.formats.jinja import JinjaFormat
from rose_dist.frontend.tokenizer import TextCodec, Tokenizer


def load_codec(directory: Path) -> TextCodec:
    """The checkpoint's tokenizer; a gpt-oss checkpoint in OpenAI's layout has none and gets Harmony's vocabulary, and
    so does gpt-oss with random weights, of which there is no folder.

    Raises:
        TokenizerError: the tokenizer's files are missing or can't be used.
    """
    if directory.name.startswith("gpt-oss-") and not directory.exists():
        return HarmonyCodec(HarmonyVocabulary.find())
    config = directory / "config.json"
    bare = not (directory / "tokenizer.json").exists() and config.exists()
    if bare and json.loads(config.read_bytes()).get("vocab_size") == SIZE:
        return HarmonyCodec(HarmonyVocabulary.find())
    return Tokenizer(directory)


def choose_format(name: str, codec: TextCodec, *, template_path: str | None = None) -> ChatFormat:
    """
    Args:
        name: one of `CHAT_FORMATS`.
        template_path: a jinja file that replaces the checkpoint's template.

    Raises:
        FormatError: no such format, or the checkpoint lacks what it needs.
    """
    if name not in CHAT_FORMATS:
        raise FormatError(f"There is no chat format `{name}`; there are {', '.join(CHAT_FORMATS)}")
    if name == "auto":
        name = "harmony" if template_path is None and _speaks_harmony(codec) else "jinja"
    if name == "harmony":
        return HarmonyFormat(codec.directory if isinstance(codec, Tokenizer) else None)
    if not isinstance(codec, Tokenizer):
        raise FormatError("The chat format jinja needs the checkpoint's tokenizer.json")
    template = Path(template_path).read_text(encoding="utf-8") if template_path else codec.chat_template
    if template is None:
        raise FormatError(
            f"{codec.directory} has no chat template (neither chat_template.jinja nor tokenizer_config.json's "
            "chat_template): give one with --chat-template"
        )
    return JinjaFormat(codec, template)


def _speaks_harmony(codec: TextCodec) -> bool:
    return isinstance(codec, HarmonyCodec) or (
        isinstance(codec, Tokenizer) and codec.added.get("<|channel|>") == CHANNEL
    )
