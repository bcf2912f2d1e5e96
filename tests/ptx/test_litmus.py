"""The memory model against the litmus tests of the PTX memory model, each thread of a test on its own GPU (or CTA)."""

import pytest
import torch

from tests.ptx.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.program import Program
from tests.ptx.source import kernel, launch

SCHEDULES = 500

PARAMS = ("u64 x", "u64 y", "u64 out")
LOAD = "ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y]; ld.param.u64 %d3, [out];"


def thread(body: str) -> Program:
    """A one-thread program over locations x (%d1), y (%d2) and its results (%d3)."""
    return kernel(LOAD + body, PARAMS)


def outcomes(
    threads: list[Program], schedules: int, *, same_gpu: bool = False, races: str = "off", results: int = 2
) -> dict[tuple[int, ...], int]:
    """How often each tuple of all threads' results occurs; x and y start at 0, results that no thread writes stay −1."""
    counts: dict[tuple[int, ...], int] = {}
    machine = Machine()
    x, y = machine.zeros(1, torch.int32, name="x"), machine.zeros(1, torch.int32, name="y")
    out = machine.zeros((len(threads), results), torch.int32, name="out")
    for seed in range(schedules):
        x.zero_(), y.zero_(), out.fill_(-1)
        launches = [_one(p, x, y, out[i], i, same_gpu=same_gpu) for i, p in enumerate(threads)]
        machine.run(launches, seed=seed, races=races)
        key = tuple(out.flatten().tolist())
        counts[key] = counts.get(key, 0) + 1
    return counts


def _one(
    program: Program, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, number: int, *, same_gpu: bool
) -> Launch:
    return launch(program, x, y, out, block=1, gpu=0 if same_gpu else number)


def writer(store: str, fence: str = "") -> Program:
    return thread(f"mov.u32 %r1, 1; st.global.u32 [%d1], %r1; {fence} {store} [%d2], %r1;")


def reader(load: str, fence: str = "") -> Program:
    return thread(
        f"WAIT: {load} %r1, [%d2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT; {fence} ld.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;"
    )


def stale(write: Program, read: Program, schedules: int = SCHEDULES) -> int:
    """How many schedules of message passing read old data."""
    counts = outcomes([write, read], schedules, results=1)
    return sum(n for (_, seen), n in counts.items() if seen != 1)


RELEASE, ACQUIRE = "st.release.sys.global.u32", "ld.acquire.sys.global.u32"


def test_message_passing_is_right_in_every_schedule() -> None:
    assert stale(writer(RELEASE), reader(ACQUIRE)) == 0


def test_message_passing_with_fences_is_right_in_every_schedule() -> None:
    write = writer("st.relaxed.sys.global.u32", "fence.acq_rel.sys;")
    assert stale(write, reader("ld.relaxed.sys.global.u32", "fence.acq_rel.sys;"), 200) == 0
    assert (
        stale(writer("st.volatile.global.u32", "membar.sys;"), reader("ld.volatile.global.u32", "membar.sys;"), 200)
        == 0
    )


def test_message_passing_by_atomics_is_right_in_every_schedule() -> None:
    assert stale(writer("red.release.sys.global.add.u32"), reader("ld.acquire.sys.global.u32"), 200) == 0
    read = thread(
        "WAIT: atom.acquire.sys.global.or.b32 %r1, [%d2], 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT; ld.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;"
    )
    assert stale(writer(RELEASE), read, 200) == 0


WEAKENED = {
    "relaxed store": (writer("st.relaxed.sys.global.u32"), reader(ACQUIRE)),
    "weak store": (writer("st.global.u32"), reader(ACQUIRE)),
    "release at gpu scope": (writer("st.release.gpu.global.u32"), reader(ACQUIRE)),
    "release at cta scope": (writer("st.release.cta.global.u32"), reader(ACQUIRE)),
    "fence at gpu scope": (writer("st.relaxed.sys.global.u32", "fence.acq_rel.gpu;"), reader(ACQUIRE)),
    "relaxed load": (writer(RELEASE), reader("ld.relaxed.sys.global.u32")),
    "weak load": (writer(RELEASE), reader("ld.global.u32")),
    "acquire at gpu scope": (writer(RELEASE), reader("ld.acquire.gpu.global.u32")),
    "reader's fence at gpu scope": (writer(RELEASE), reader("ld.relaxed.sys.global.u32", "fence.acq_rel.gpu;")),
    "relaxed add": (writer("red.relaxed.sys.global.add.u32"), reader(ACQUIRE)),
}


@pytest.mark.parametrize("name", WEAKENED)
def test_every_weakened_message_passing_reads_stale_data(name: str) -> None:
    write, read = WEAKENED[name]
    assert stale(write, read, 100) > 10


@pytest.mark.parametrize("name", WEAKENED)
def test_every_weakened_message_passing_is_a_race_in_each_schedule(name: str) -> None:
    write, read = WEAKENED[name]
    machine = Machine()
    x, y, out = (machine.zeros(1, torch.int32) for _ in range(3))
    for seed in range(20):
        y.zero_()
        launches = [launch(p, x, y, out, block=1, gpu=i) for i, p in enumerate((write, read))]
        assert machine.run(launches, seed=seed, races="count").races > 0


def test_gpu_scope_is_enough_inside_one_gpu() -> None:
    machine = Machine()
    x, y, out = (machine.zeros(1, torch.int32) for _ in range(3))
    both = kernel(
        LOAD + "mov.u32 %r9, %ctaid.x; setp.ne.u32 %p9, %r9, 0; @%p9 bra WAIT;"
        "mov.u32 %r1, 1; st.global.u32 [%d1], %r1; st.release.gpu.global.u32 [%d2], %r1; ret;"
        "WAIT: ld.acquire.gpu.global.u32 %r1, [%d2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT; ld.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;",
        PARAMS,
    )  # fmt: skip
    for seed in range(100):
        x.zero_(), y.zero_(), out.zero_()
        assert machine.run([launch(both, x, y, out, grid=2, block=1)], seed=seed).races == 0
        assert out.item() == 1


def store_buffering(fence: str) -> list[Program]:
    first = thread(
        f"mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d1], %r1; {fence} ld.relaxed.sys.global.u32 %r2, [%d2]; st.global.u32 [%d3], %r2;"
    )
    second = thread(
        f"mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d2], %r1; {fence} ld.relaxed.sys.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;"
    )
    return [first, second]


def test_store_buffering_is_seen_without_a_sequentially_consistent_fence() -> None:
    assert (0, 0) in outcomes(store_buffering(""), 200, results=1)
    assert (0, 0) in outcomes(store_buffering("fence.acq_rel.sys;"), 200, results=1)
    assert (0, 0) not in outcomes(store_buffering("fence.sc.sys;"), 200, results=1)


def independent_reads(load: str) -> list[Program]:
    """IRIW: two writers, two readers that read in opposite order."""
    write_x = thread("mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d1], %r1;")
    write_y = thread("mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d2], %r1;")
    read_xy = thread(f"{load} %r1, [%d1]; {load} %r2, [%d2]; st.global.v2.u32 [%d3], {{%r1, %r2}};")
    read_yx = thread(f"{load} %r1, [%d2]; {load} %r2, [%d1]; st.global.v2.u32 [%d3], {{%r1, %r2}};")
    return [write_x, write_y, read_xy, read_yx]


def test_independent_readers_may_disagree_on_the_order_of_writes() -> None:
    """Allowed by PTX even with acquire loads: only fence.sc forbids it."""
    seen = outcomes(independent_reads("ld.acquire.sys.global.u32"), 400)
    assert any(key[4:] == (1, 0, 1, 0) for key in seen)


def test_load_buffering_is_not_modelled() -> None:
    """PTX allows both loads to see the other thread's later store; this machine never executes a store early."""
    first = thread(
        "ld.relaxed.sys.global.u32 %r2, [%d1]; mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d2], %r1; st.global.u32 [%d3], %r2;"
    )
    second = thread(
        "ld.relaxed.sys.global.u32 %r2, [%d2]; mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d1], %r1; st.global.u32 [%d3], %r2;"
    )
    assert (1, 1) not in outcomes([first, second], 200, results=1)


def test_reads_of_one_location_never_go_back() -> None:
    """Coherence: once a thread has seen a write, it does not see an older one."""
    write = thread(
        "mov.u32 %r1, 1; st.relaxed.sys.global.u32 [%d1], %r1; mov.u32 %r1, 2; st.relaxed.sys.global.u32 [%d1], %r1;"
    )
    read = thread(
        "ld.relaxed.sys.global.u32 %r1, [%d1]; ld.relaxed.sys.global.u32 %r2, [%d1]; st.global.v2.u32 [%d3], {%r1, %r2};"
    )
    seen = outcomes([write, read], 300)
    assert all(key[2] <= key[3] for key in seen)
    assert {key[2:] for key in seen} >= {(0, 0), (0, 2), (1, 2), (2, 2)}


def test_a_release_is_cumulative_over_a_third_thread() -> None:
    """WRC with releases: what the second thread acquired before its release is published by it too."""
    first = thread("mov.u32 %r1, 1; st.global.u32 [%d1], %r1; st.release.sys.global.u32 [%d2], %r1;")
    second = thread(
        "A: ld.acquire.sys.global.u32 %r1, [%d2]; setp.ne.u32 %p1, %r1, 1; @%p1 bra A; mov.u32 %r2, 2; st.release.sys.global.u32 [%d2], %r2;"
    )
    third = thread(
        "B: ld.acquire.sys.global.u32 %r1, [%d2]; setp.ne.u32 %p1, %r1, 2; @%p1 bra B; ld.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;"
    )
    assert all(key[2] == 1 for key in outcomes([first, second, third], 100, races="error", results=1))


def test_a_relaxed_atomic_carries_on_a_release_sequence() -> None:
    first = writer(RELEASE)
    second = thread(
        "A: ld.relaxed.sys.global.u32 %r1, [%d2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra A; red.relaxed.sys.global.add.u32 [%d2], 1;"
    )
    third = thread(
        "B: ld.acquire.sys.global.u32 %r1, [%d2]; setp.ne.u32 %p1, %r1, 2; @%p1 bra B; ld.global.u32 %r2, [%d1]; st.global.u32 [%d3], %r2;"
    )
    assert all(key[2] == 1 for key in outcomes([first, second, third], 100, races="error", results=1))


def test_a_flag_may_be_read_plainly_after_its_acquire() -> None:
    """The release itself is ordered before what follows the acquire."""
    read = reader(ACQUIRE, "ld.global.u32 %r3, [%d2];")
    assert stale(writer(RELEASE), read, 20) == 0
    outcomes([writer(RELEASE), read], 20, races="error", results=1)


@pytest.mark.parametrize(
    ("store", "load", "races"), [("sys", "sys", False), ("gpu", "sys", True), ("sys", "gpu", True)]
)
def test_strong_accesses_race_unless_each_scope_includes_the_other_thread(store: str, load: str, races: bool) -> None:
    write = thread(f"mov.u32 %r1, 1; st.relaxed.{store}.global.u32 [%d2], %r1;")
    read = thread(f"WAIT: ld.relaxed.{load}.global.u32 %r1, [%d2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;")
    machine = Machine()
    x, y, out = (machine.zeros(1, torch.int32) for _ in range(3))
    counts = []
    for seed in range(10):
        y.zero_()
        both = [launch(p, x, y, out, block=1, gpu=i) for i, p in enumerate((write, read))]
        counts.append(machine.run(both, seed=seed, races="count").races)
    assert all(counts) if races else not any(counts)


@pytest.mark.parametrize("beside", ["", "st.relaxed.sys.global.u32 [%d1+16], %r1;"], ids=["alone", "beside a word"])
def test_a_flag_inside_a_16_byte_packet(beside: str) -> None:
    """Data and flag in one vector store arrive together, unless the run is told to tear vectors."""
    write = thread(f"mov.u32 %r1, 1; {beside} st.relaxed.sys.global.v4.u32 [%d1], {{%r1, %r1, %r1, %r1}};")
    read = thread(
        "WAIT: ld.relaxed.sys.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1]; setp.eq.u32 %p1, %r4, 0; @%p1 bra WAIT;"
        "add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; st.global.u32 [%d3], %r1;"
    )
    machine = Machine()
    x, out = machine.zeros(8, torch.int32), machine.zeros(1, torch.int32)

    def sums(vector_atomic: bool) -> set[int]:
        seen = set()
        for seed in range(60):
            x.zero_()
            both = [launch(p, x, x, out, block=1, gpu=i) for i, p in enumerate((write, read))]
            machine.run(both, seed=seed, vector_atomic=vector_atomic)
            seen.add(out.item())
        return seen

    assert sums(vector_atomic=True) == {3}
    assert len(sums(vector_atomic=False)) > 1
