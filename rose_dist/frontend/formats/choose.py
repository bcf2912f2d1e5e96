"""Which chat format a checkpoint gets."""

from __future__ import annotations

from pathlib import Path

from rose_dist.frontend.formats.base import ChatFormat, FormatError
from rose_dist.frontend.formats.jinja import JinjaFormat
from rose_dist.frontend.tokenizer import Tokenizer

FORMATS = ("jinja",)


def choose_format(name: str, tokenizer: Tokenizer, *, template_path: str | None = None) -> ChatFormat:
    """
    Args:
        name: one of `FORMATS`, or `auto`: the format that the checkpoint's files call for.
        template_path: a jinja file that replaces the checkpoint's template.

    Raises:
        FormatError: no such format, or the checkpoint lacks what it needs.
    """
    if name not in ("auto", *FORMATS):
        raise FormatError(f"There is no chat format `{name}`; there are auto, {', '.join(FORMATS)}")
    template = Path(template_path).read_text(encoding="utf-8") if template_path else tokenizer.chat_template
    if template is None:
        raise FormatError(
            f"{tokenizer.directory} has no chat template (neither chat_template.jinja nor tokenizer_config.json's "
            "chat_template): give one with --chat-template"
        )
    return JinjaFormat(tokenizer, template)
