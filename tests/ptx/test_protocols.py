"""Small communication protocols on emulated GPUs, each right in every schedule and caught when weakened."""

import pytest
import torch

from tests.ptx.errors import DataRace, Deadlock, Trap
from tests.ptx.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.program import Program
from tests.ptx.source import kernel, launch


def grid_barrier(
    red: str = "red.release.gpu",
    load: str = "ld.acquire.gpu",
    barriers: tuple[str, str] = ("bar.sync 0;", "bar.sync 0;"),
) -> Program:
    """Every thread writes its slot, the grid meets at a monotone counter, every thread reads its neighbour CTA's slot."""
    return kernel(
        f"""
        ld.param.u64 %d1, [slots]; ld.param.u64 %d2, [counter]; ld.param.u64 %d3, [out]; ld.param.u32 %r10, [epoch];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x; mov.u32 %r4, %ntid.x;
        mad.lo.u32 %r5, %r2, %r4, %r1;  mul.wide.u32 %d4, %r5, 4;  add.u64 %d5, %d1, %d4;
        add.u32 %r6, %r5, %r10;  st.global.u32 [%d5], %r6;
        {barriers[0]}
        setp.ne.u32 %p1, %r1, 0;  @%p1 bra DONE;
        {red}.global.add.u32 [%d2], 1;
        mul.lo.u32 %r7, %r10, %r3;
        SPIN: {load}.global.u32 %r8, [%d2]; setp.lt.u32 %p2, %r8, %r7; @%p2 bra SPIN;
        DONE:
        {barriers[1]}
        add.u32 %r2, %r2, 1; rem.u32 %r2, %r2, %r3; mad.lo.u32 %r9, %r2, %r4, %r1; mul.wide.u32 %d6, %r9, 4; add.u64 %d6, %d1, %d6;
        ld.global.u32 %r11, [%d6]; add.u64 %d7, %d3, %d4; st.global.u32 [%d7], %r11;
        """,
        ("u64 slots", "u64 counter", "u64 out", "u32 epoch"),
    )  # fmt: skip


def run_grid_barrier(
    program: Program, seed: int, ctas: int = 5, threads: int = 64, races: str = "error", **options: object
) -> bool:
    machine = Machine()
    slots, counter, out = (
        machine.empty(ctas * threads, torch.int32),
        machine.zeros(1, torch.int32),
        machine.empty(ctas * threads, torch.int32),
    )
    for epoch in (1, 2):
        machine.run(
            [launch(program, slots, counter, out, epoch, grid=ctas, block=threads)], seed=seed, races=races, **options
        )  # type: ignore[arg-type]
        expected = (torch.arange(ctas * threads).roll(-threads) + epoch).int()
        if not torch.equal(out, expected):
            return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_grid_barrier(seed: int) -> None:
    assert run_grid_barrier(grid_barrier(), seed)


@pytest.mark.parametrize(
    "weakened",
    [
        {"red": "red.relaxed.gpu"},
        {"load": "ld.relaxed.gpu"},
        {"red": "red.release.cta"},
        {"barriers": ("", "bar.sync 0;")},
        {"barriers": ("bar.sync 0;", "")},
    ],
    ids=["relaxed add", "relaxed load", "cta scope", "no barrier before", "no barrier after"],
)
def test_a_weakened_grid_barrier_is_a_race_and_reads_stale_data(weakened: dict) -> None:  # type: ignore[type-arg]
    program = grid_barrier(**weakened)
    with pytest.raises(DataRace, match="nothing that orders them"):
        all(run_grid_barrier(program, seed) for seed in range(20))
    assert not all(run_grid_barrier(program, seed, races="off") for seed in range(20))


def test_a_grid_barrier_of_ctas_that_do_not_all_fit_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="polls"):
        run_grid_barrier(grid_barrier(), 0, resident=3)


BOUNDED_WAIT = """
    ld.param.u64 %d1, [flag]; ld.param.u64 %d2, [report]; ld.param.u64 %d3, [limit];
    mov.u64 %d4, %globaltimer; add.u64 %d4, %d4, %d3;
    SPIN: ld.acquire.sys.global.u32 %r1, [%d1]; setp.ne.u32 %p1, %r1, 0; @%p1 bra OK;
    mov.u64 %d5, %globaltimer; setp.lt.u64 %p2, %d5, %d4; @%p2 bra SPIN;
    mov.u32 %r2, 77; st.global.u32 [%d2], %r2; ret;
    OK: mov.u32 %r2, 1; st.global.u32 [%d2], %r2;
"""


def test_a_bounded_wait_for_a_dead_peer_expires_and_reports() -> None:
    machine = Machine()
    flag, report = machine.zeros(1, torch.int32), machine.zeros(1, torch.int32)
    wait = kernel(BOUNDED_WAIT, ("u64 flag", "u64 report", "u64 limit"))
    ten_seconds = 10_000_000_000
    run = machine.run([launch(wait, flag, report, ten_seconds, block=1)], seed=1)
    assert report.item() == 77
    assert run.nanoseconds > ten_seconds
    assert run.turns < 20_000


def test_many_waiters_expire_too() -> None:
    """Polling is no progress, however the turns of the waiters are cut."""
    machine = Machine()
    flag, report = machine.zeros(1, torch.int32), machine.zeros(1, torch.int32)
    wait = kernel(BOUNDED_WAIT, ("u64 flag", "u64 report", "u64 limit"))
    run = machine.run([launch(wait, flag, report, 10_000_000_000, grid=6, block=64)], seed=3)
    assert report.item() == 77
    assert run.turns < 20_000


def test_a_bounded_wait_for_a_slow_peer_does_not_expire() -> None:
    """Time runs fast only while nobody gets on."""
    machine = Machine()
    flag, report, work = machine.zeros(1, torch.int32), machine.zeros(1, torch.int32), machine.zeros(1, torch.int32)
    wait = kernel(BOUNDED_WAIT, ("u64 flag", "u64 report", "u64 limit"))
    slow = kernel(
        """ld.param.u64 %d1, [flag]; ld.param.u64 %d2, [work]; mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; st.global.u32 [%d2], %r1; setp.lt.u32 %p1, %r1, 3000; @%p1 bra LOOP;
        st.release.sys.global.u32 [%d1], %r1;""",
        ("u64 flag", "u64 work"),
    )
    machine.run([launch(wait, flag, report, 100_000_000, block=1), launch(slow, flag, work, block=1, gpu=1)], seed=2)
    assert report.item() == 1


def test_an_unbounded_wait_is_a_deadlock_that_names_the_line() -> None:
    machine = Machine()
    flag = machine.zeros(1, torch.int32)
    wait = kernel(
        "ld.param.u64 %d1, [flag]; SPIN: ld.acquire.sys.global.u32 %r1, [%d1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;",
        ("u64 flag",),
    )
    with pytest.raises(Deadlock, match=r"GPU 0, CTA 0, thread 0\) polls"):
        machine.run([launch(wait, flag, block=1)])


def test_trap_is_reported_with_its_place() -> None:
    program = kernel(
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r1, 5; setp.eq.and.u32 %p2, %r2, 1, %p1; @%p2 trap;"
    )
    with pytest.raises(Trap, match=r"test:\d+: `@%p2 trap` \(GPU 0, CTA 1, thread 5\)"):
        Machine().run([launch(program, grid=2)])


TOKENS, ROW = 6, 64  # rows of 64 words: one warp a token, 8 bytes a lane


def push(sync: str = "bar.warp.sync -1;", flag: str = "st.release.sys") -> Program:
    """Warp t writes row t into the peer's buffer; its lane 0 then raises the token's flag to the epoch."""
    return kernel(
        f"""
        ld.param.u64 %d1, [source]; ld.param.u64 %d2, [remote]; ld.param.u64 %d3, [flags]; ld.param.u32 %r9, [epoch];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
        shr.u32 %r5, %r4, 5; and.b32 %r6, %r4, 31; mul.wide.u32 %d4, %r4, 8;
        add.u64 %d5, %d1, %d4; ld.global.nc.L1::no_allocate.v2.u32 {{%r7, %r8}}, [%d5]; add.u64 %d6, %d2, %d4;
        st.global.L1::no_allocate.v2.u32 [%d6], {{%r7, %r8}};
        {sync}
        mul.wide.u32 %d7, %r5, 4; add.u64 %d8, %d3, %d7; setp.eq.u32 %p1, %r6, 0;
        @%p1 {flag}.global.u32 [%d8], %r9;
        """,
        ("u64 source", "u64 remote", "u64 flags", "u32 epoch"),
    )  # fmt: skip


def pull(load: str = "ld.acquire.sys", sync: str = "bar.warp.sync -1;") -> Program:
    """Warp t waits for the flag of token t in its own memory, then copies the row."""
    return kernel(
        f"""
        ld.param.u64 %d1, [rows]; ld.param.u64 %d2, [flags]; ld.param.u64 %d3, [out]; ld.param.u32 %r9, [epoch];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
        shr.u32 %r5, %r4, 5; and.b32 %r6, %r4, 31; mul.wide.u32 %d4, %r5, 4; add.u64 %d5, %d2, %d4;
        setp.ne.u32 %p1, %r6, 0; @%p1 bra READY;
        SPIN: {load}.global.u32 %r7, [%d5]; setp.ne.u32 %p2, %r7, %r9; @%p2 bra SPIN;
        READY: {sync}
        mul.wide.u32 %d6, %r4, 8; add.u64 %d7, %d1, %d6; ld.global.v2.u32 {{%r10, %r11}}, [%d7];
        add.u64 %d8, %d3, %d6; st.global.v2.u32 [%d8], {{%r10, %r11}};
        """,
        ("u64 rows", "u64 flags", "u64 out", "u32 epoch"),
    )  # fmt: skip


def run_dispatch(send: Program, receive: Program, seed: int, races: str = "error") -> bool:
    """Two GPUs send to each other for two epochs (buffers alternate by epoch); True if all rows arrive whole."""
    machine = Machine()
    shape = (2, TOKENS, ROW)
    rows = [machine.zeros(shape, torch.int32, gpu=g, name=f"rows of GPU {g}") for g in range(2)]
    flags = [machine.zeros((2, TOKENS), torch.int32, gpu=g, name=f"flags of GPU {g}") for g in range(2)]
    out = [machine.empty((TOKENS, ROW), torch.int32, gpu=g) for g in range(2)]
    for epoch in (1, 2):
        source = [machine.tensor(torch.randint(2**31, (TOKENS, ROW), dtype=torch.int32), gpu=g) for g in range(2)]
        half = epoch % 2
        launches: list[Launch] = []
        for g in range(2):
            peer = 1 - g
            launches.append(
                launch(send, source[g], rows[peer][half], flags[peer][half], epoch, grid=2, block=96, gpu=g)
            )
            launches.append(launch(receive, rows[g][half], flags[g][half], out[g], epoch, grid=3, block=64, gpu=g))
        machine.run(launches, seed=seed, races=races)
        if not all(torch.equal(out[g], source[1 - g]) for g in range(2)):
            return False
    return True


@pytest.mark.parametrize("seed", range(10))
def test_dispatch_with_a_flag_a_token(seed: int) -> None:
    assert run_dispatch(push(), pull(), seed)


WEAKENED = {
    "no warp barrier before the flag": (push(sync=""), pull()),
    "relaxed flag": (push(flag="st.relaxed.sys"), pull()),
    "weak flag": (push(flag="st"), pull()),
    "flag at gpu scope": (push(flag="st.release.gpu"), pull()),
    "relaxed wait": (push(), pull(load="ld.relaxed.sys")),
    "wait at gpu scope": (push(), pull(load="ld.acquire.gpu")),
    "no warp barrier after the wait": (push(), pull(sync="")),
}


@pytest.mark.parametrize("name", WEAKENED)
def test_each_weakened_dispatch_is_a_race_and_corrupts_rows(name: str) -> None:
    send, receive = WEAKENED[name]
    with pytest.raises(DataRace):
        all(run_dispatch(send, receive, seed) for seed in range(10))
    assert not all(run_dispatch(send, receive, seed, races="off") for seed in range(10))
