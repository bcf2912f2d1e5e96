"""The list of weakenings, and that the protocols of test_protocols notice each."""

import pytest

from tests.ptx.errors import PtxError
from tests.ptx.program import Program
from tests.ptx.source import kernel
from tests.ptx.test_protocols import grid_barrier, pull, push, run_dispatch, run_grid_barrier
from tests.ptx.weaken import weakenings


def test_the_list() -> None:
    program = kernel(
        """bar.sync 0; fence.acq_rel.sys; atom.acq_rel.gpu.global.add.u32 %r1, [%d1], 1; ld.global.u32 %r1, [%d1];
        st.release.sys.global.u32 [%d1], %r1; ld.acquire.gpu.global.u32 %r1, [%d1]; bar.warp.sync -1;"""
    )
    found = [(w.text.split()[0], w.change) for w in weakenings(program)]
    assert found == [
        ("bar.sync", "dropped"),
        ("fence.acq_rel.sys", "dropped"),
        ("fence.acq_rel.sys", "scope sys made gpu"),
        ("atom.acq_rel.gpu.global.add.u32", "release dropped"),
        ("atom.acq_rel.gpu.global.add.u32", "acquire dropped"),
        ("atom.acq_rel.gpu.global.add.u32", "scope gpu made cta"),
        ("st.release.sys.global.u32", "release made relaxed"),
        ("st.release.sys.global.u32", "scope sys made gpu"),
        ("ld.acquire.gpu.global.u32", "acquire made relaxed"),
        ("ld.acquire.gpu.global.u32", "scope gpu made cta"),
        ("bar.warp.sync", "dropped"),
    ]
    assert len(list(weakenings(program, scopes=False, barriers=False))) == 5


def caught(run: object) -> bool:
    try:
        return not all(run(seed) for seed in range(10))  # type: ignore[operator]
    except PtxError:
        return True


@pytest.mark.parametrize("index", range(6))
def test_every_weakened_grid_barrier_is_caught(index: int) -> None:
    weakened = list(weakenings(grid_barrier()))
    assert len(weakened) == 6
    assert caught(lambda seed: run_grid_barrier(weakened[index].program, seed)), weakened[index]


def dispatch_weakenings() -> list[tuple[str, Program, Program]]:
    send, receive = push(), pull()
    return [(str(w), w.program, receive) for w in weakenings(send)] + [
        (str(w), send, w.program) for w in weakenings(receive)
    ]


@pytest.mark.parametrize(
    ("name", "send", "receive"), dispatch_weakenings(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_weakened_dispatch_is_caught(name: str, send: Program, receive: Program) -> None:
    assert caught(lambda seed: run_dispatch(send, receive, seed)), name
