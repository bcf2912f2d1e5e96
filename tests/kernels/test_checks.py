"""Checks that are made once for each form of arguments."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rose_dist.kernels import checks
from rose_dist.kernels.errors import KernelArgumentError


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    scale: float


def test_what_may_change_an_answer_is_checked_again() -> None:
    made: list[object] = []

    @checks.once
    def check(x: torch.Tensor, other: object = None) -> int:
        made.append(other)
        return len(made)

    x = torch.zeros(4, 64)
    assert [check(x), check(torch.ones(4, 64)), check(x)] == [1, 1, 1]
    new = (
        x.bfloat16(), x[:2], x[:, :32], x.t(), torch.zeros(4, 64, device="meta"),
        torch.zeros(4 * 64 + 1)[1:].view(4, 64),  # 4 bytes further
    )  # fmt: skip
    assert [check(other) for other in new] == list(range(2, 8))
    parts = [None, 3, 4, (x, 1), (x[:1], 1), Pair(x, 1.0), Pair(x, 2.0), Pair(x[:1], 2.0)]
    assert [check(x, part) for part in parts] == list(range(8, 16))
    assert [check(torch.ones(4, 64), part) for part in parts] == list(range(8, 16))
    assert check(x, other=Pair(x, 1.0)) == 16
    check.cache_clear()  # type: ignore[attr-defined]
    assert check(x) == 17


def test_an_error_is_not_remembered_as_an_answer() -> None:
    @checks.once
    def check(x: torch.Tensor) -> None:
        checks.shape("x", x, 4)

    for _ in range(2):
        with pytest.raises(KernelArgumentError, match="x: shape"):
            check(torch.zeros(3))


def test_not_everything_is_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_FORMS", 3)
    made: list[int] = []
    check = checks.once(made.append)
    for rows in (1, 2, 3, 3, 4, 4, 1):
        check(rows)
    assert made == [1, 2, 3, 4, 1]
