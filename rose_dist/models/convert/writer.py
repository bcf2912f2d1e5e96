"""Writes a checkpoint folder shard by shard; it appears under its name only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file

from rose_dist.models.checkpoint import CheckpointError

DEFAULT_SHARD_BYTES = 2 * 10**9


class CheckpointWriter:
    """Collects tensors and files in a hidden folder beside `target`, and renames it to `target` on a clean exit.

    At most one shard and one tensor are in memory. A single shard is called `model.safetensors`; several are
    numbered and come with `model.safetensors.index.json`.

    Args:
        target: must not exist, or be an empty folder.
        shard_bytes: a shard is written before it would grow past this; a larger tensor has a shard of its own.
    """

    def __init__(self, target: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{target} exists; remove it or name another folder")
        self._target = target
        self._folder = target.with_name(f".{target.name}.partial-{os.getpid()}")
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of any shape and dtype; it must not change afterwards."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size

    def add_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.add(name, tensor)

    def add_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.add_text(name, json.dumps(content, indent=2) + "\n")

    def add_text(self, name: str, content: str) -> None:
        (self._folder / name).write_text(content, encoding="utf-8")

    def add_file(self, source: Path) -> None:
        shutil.copyfile(source, self._folder / source.name)

    def _flush(self) -> None:
        save_file(self._pending, self._folder / f"{len(self._shards)}.safetensors", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        os.umask(umask := os.umask(0))
        for number, names in enumerate(self._shards):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            file = (self._folder / f"{number}.safetensors").rename(self._folder / final)
            file.chmod(0o666 & ~umask)  # the library makes it private
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self.add_json("model.safetensors.index.json", index)
        if self._target.exists():
            self._target.rmdir()
        self._folder.rename(self._target)
