"""Reading a checkpoint folder: which tensors it has, in Hugging Face's names, and parts of them on demand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rose_dist.errors import RoseError
from rose_dist.layers.weights import Piece, Weight

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""

REOPEN_AFTER = 256 << 20
"""Bytes read from a file before it is mapped anew, so that its pages don't stay in the process's resident memory."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


class CheckpointError(RoseError):
    """A checkpoint folder that is missing, incomplete, damaged or of another shape than its configuration says."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it, or some rows of one.

    rows: None, or the part of the first dimension that goes by this name (OpenAI fuses q, k and v).
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: slice | None = None

    def rows_of(self, rows: slice) -> StoredTensor:
        return replace(self, rows=rows, shape=(rows.stop - rows.start, *self.shape[1:]))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json's content."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give the one that holds config.json and *.safetensors (nothing is downloaded)"
        )
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json; is it a checkpoint folder?") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, not an object")
    return config


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of every *.safetensors file, checked against the index file if there is one."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        wanted = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        if absent := sorted(path.name for path in wanted - set(files)):
            raise CheckpointError(f"{folder} lacks {_some(absent)}, which {index.name} names; copy the missing files")
        files = sorted(wanted)
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _list_file(file)
    return tensors


def _list_file(file: Path) -> dict[str, StoredTensor]:
    found = {}
    with _open(file) as opened:
        for name in opened.keys():  # noqa: SIM118  not a mapping
            part = opened.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{file.name}: {name} has dtype {part.get_dtype()}, known are {_some(_DTYPES)}")
            found[name] = StoredTensor(file, name, tuple(part.get_shape()), dtype)
    return found


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} can't be read: {error}. It may be cut short: compare its size, copy it again"
        ) from None


def load(weights: Iterable[Weight], tensors: dict[str, StoredTensor], progress: Progress | None = None) -> None:
    """Read each weight's pieces, and only those, and store them.

    Raises:
        CheckpointError: tensors that are missing, left over, or of another shape or dtype; the message lists them.
    """
    wanted = list(weights)
    check([piece for weight in wanted for piece in weight.pieces], tensors)
    mine = [weight for weight in wanted if weight.store is not None]
    mine.sort(key=lambda weight: tensors[weight.pieces[0].name].file)
    total = sum(_bytes(piece, tensors) for weight in mine for piece in weight.pieces)
    done = 0
    with Reader(tensors) as reader:
        for weight in mine:
            assert weight.store is not None
            weight.store(*(reader.read(piece) for piece in weight.pieces))
            done += sum(_bytes(piece, tensors) for piece in weight.pieces)
            if progress is not None:
                progress(done, total)


class Reader:
    """Reads parts of tensors; keeps the files it reads open, and lets go of their pages now and then."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._open_files: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._read_since_open = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, piece: Piece) -> Tensor:
        stored = self._tensors[piece.name]
        if self._read_since_open > REOPEN_AFTER:
            self._close()
        if stored.file not in self._open_files:
            self._open_files[stored.file] = self._stack.enter_context(_open(stored.file))
        part = piece.part
        if stored.rows is not None:
            part = (slice(stored.rows.start + part[0].start, stored.rows.start + part[0].stop), *part[1:])
        tensor: Tensor = self._open_files[stored.file].get_slice(stored.name)[part]
        self._read_since_open += tensor.nbytes
        return tensor

    def _close(self) -> None:
        self._stack.close()
        self._open_files.clear()
        self._read_since_open = 0


def check(pieces: list[Piece], tensors: dict[str, StoredTensor]) -> None:
    """Raises `CheckpointError` unless `pieces` name every tensor, and each has the shape and dtype expected."""
    problems = []
    names = {piece.name for piece in pieces}
    if missing := sorted(names - tensors.keys()):
        problems.append(f"missing: {_some(missing)}")
    if surplus := sorted(tensors.keys() - names):
        problems.append(f"not part of this model: {_some(surplus)}")
    wrong = {name: text for piece in pieces if (text := _mismatch(piece, tensors)) for name in [piece.name]}
    if wrong:
        problems.append(f"of another shape or dtype: {_some([f'{name} {text}' for name, text in wrong.items()])}")
    if problems:
        raise CheckpointError("the checkpoint does not fit its config.json. " + "; ".join(problems))


def _mismatch(piece: Piece, tensors: dict[str, StoredTensor]) -> str | None:
    stored = tensors.get(piece.name)
    if stored is None:
        return None
    if stored.shape != piece.shape:
        return f"{list(stored.shape)} instead of {list(piece.shape)}"
    fits = stored.dtype == piece.dtype if piece.dtype else stored.dtype.is_floating_point and stored.dtype.itemsize > 1
    return None if fits else f"{stored.dtype} instead of {piece.dtype or 'fp32, fp16 or bf16'}"


def _bytes(piece: Piece, tensors: dict[str, StoredTensor]) -> int:
    elements = 1
    for part in piece.part:
        elements *= part.stop - part.start
    return elements * tensors[piece.name].dtype.itemsize


def _some(names: Iterable[str], most: int = 8) -> str:
    """The first few, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def named_weights(model: torch.nn.Module) -> Iterator[Weight]:
    """The weights of every module that has some, under its checkpoint name."""
    for name, module in model.named_modules():
        own = getattr(module, "weights", None)
        if own is not None:
            yield from own(name + ".")
