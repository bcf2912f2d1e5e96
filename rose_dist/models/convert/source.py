"""Reads a checkpoint folder tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from rose_dist.models.convert.errors import ConversionError


class CheckpointSource:
    """Every tensor of the `*.safetensors` files of a folder, memory-mapped, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConversionError(f"{folder} is not a folder; give one with config.json and *.safetensors")
        self.folder = folder
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}
        self._unread: set[str] = set()

    def __enter__(self) -> Self:
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ConversionError(f"{self.folder} holds no *.safetensors file")
        for file in files:
            try:
                handle = self._open.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                self._open.close()
                raise ConversionError(
                    f"{file} is cut short or not a safetensors file ({error}); fetch it again"
                ) from error
            for name in handle.keys():  # noqa: SIM118  not a mapping
                if name in self._handles:
                    raise ConversionError(f"{name} is in more than one file of {self.folder}")
                self._handles[name] = handle
        self._unread = set(self._handles)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, which must have `shape`."""
        if name not in self._handles:
            raise ConversionError(f"{self.folder} lacks the tensor {name}; its config.json asks for it")
        found = tuple(self._handles[name].get_slice(name).get_shape())
        if found != shape:
            raise ConversionError(f"{name} has shape {list(found)}, but config.json makes it {list(shape)}")
        self._unread.discard(name)
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor

    def unread(self) -> list[str]:
        """Names of tensors that nobody has read, sorted."""
        return sorted(self._unread)

    def config(self) -> dict[str, Any]:
        return read_json(self.folder / "config.json")

    def companions(self) -> Iterator[Path]:
        """The folder's other files: tokenizer, chat template, generation settings, licence."""
        for path in sorted(self.folder.iterdir()):
            weights = path.suffix == ".safetensors" or path.name == "model.safetensors.index.json"
            if path.is_file() and not weights and path.name != "config.json":
                yield path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
