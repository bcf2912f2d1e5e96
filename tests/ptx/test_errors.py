"""Each kind of wrong kernel is refused or caught, with the line and the thread in the message."""

import pytest
import torch

from tests.ptx.errors import (
    BarrierError,
    DataRace,
    Deadlock,
    Misaligned,
    NonCoherentRead,
    OutOfBounds,
    PtxError,
    PtxSyntaxError,
    UninitialisedRead,
    UnknownInstruction,
    WarpSyncError,
)
from tests.ptx.machine import Machine
from tests.ptx.parser import parse
from tests.ptx.source import kernel, launch

INDEX = "ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d1, %d2;"


def run(
    body: str, *arguments: object, machine: Machine | None = None, grid: int = 1, block: int = 32, **options: object
) -> None:
    names = ("u64 x", "u64 y")[: len(arguments)]
    program = kernel(body, names, declarations=".extern .shared .align 16 .b8 dynamic[];")
    (machine or Machine()).run([launch(program, *arguments, grid=grid, block=block, dynamic_shared=256)], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.fence::before_thread_sync;",
        "add.rn.bogus.f32 %f1, %f2, %f3;",
        "ld.global.frobnicate.u32 %r1, [%d1];",
        "cvt.rn.satfinite.e8m13x2.f32 %h1, %f1, %f2;",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%d1, {%f5, %f6}];",
        "atom.global.frob.u32 %r1, [%d1], 1;",
        "mov.u32 %r1, %pm0;",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
    ],
)
def test_an_unknown_instruction_names_its_line(instruction: str) -> None:
    with pytest.raises((UnknownInstruction, PtxSyntaxError), match=r":\d+|line \d+"):
        kernel(instruction)


def test_text_that_is_not_ptx() -> None:
    with pytest.raises(PtxSyntaxError, match=r"no \.target"):
        parse("hello")


def test_out_of_bounds_names_the_tensor_and_the_thread() -> None:
    machine = Machine()
    x = machine.zeros(30, torch.int32, name="x")
    with pytest.raises(OutOfBounds, match=r"nearest below is x \(120 bytes\), at its offset 120(.|\n)*thread 30\)"):
        run(INDEX + "st.global.u32 [%d2], %r1;", x, machine=machine)


def test_shared_memory_has_an_end() -> None:
    with pytest.raises(OutOfBounds, match=r"offset 256 of shared memory of CTA 0(.|\n)*thread 16\)"):
        run(
            "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.u32 %r3, dynamic; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %r1;"
        )


def test_misaligned_vector_access() -> None:
    machine = Machine()
    x = machine.zeros(64, torch.int32)
    with pytest.raises(Misaligned, match=r"16-byte alignment(.|\n)*thread 1\)"):
        run(INDEX + "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d2];", x, machine=machine)


def test_reads_of_unwritten_memory_on_request() -> None:
    machine = Machine()
    x = machine.empty(32, torch.int32, check_unwritten=True, name="x")
    with pytest.raises(UninitialisedRead, match="of x is read but was never written"):
        run(
            INDEX + "setp.lt.u32 %p1, %r1, 9; @%p1 st.global.u32 [%d2], %r1; ld.global.u32 %r2, [%d2];",
            x,
            machine=machine,
        )


def test_unwritten_shared_memory_on_request() -> None:
    with pytest.raises(UninitialisedRead, match="shared memory"):
        run("mov.u32 %r3, dynamic; ld.shared.u32 %r1, [%r3];", machine=Machine(check_shared=True))


def test_non_coherent_loads_of_written_data() -> None:
    machine = Machine()
    x = machine.zeros(32, torch.int32, name="x")
    body = INDEX + "st.global.u32 [%d2], %r1; ld.global.nc.u32 %r2, [%d2];"
    with pytest.raises(NonCoherentRead, match="x: granule 0 was written during this launch"):
        run(body, x, machine=machine)
    run(body, x, machine=machine, non_coherent=False)


SHARED_EXCHANGE = """
    mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, dynamic; add.u32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1;
    {} xor.b32 %r5, %r2, 128; add.u32 %r5, %r3, %r5; ld.shared.u32 %r6, [%r5];"""


def test_a_missing_cta_barrier_is_a_race() -> None:
    run(SHARED_EXCHANGE.format("bar.sync 0;"), block=64)
    with pytest.raises(DataRace, match="shared memory of CTA 0"):
        run(SHARED_EXCHANGE.format(""), block=64)


def test_a_missing_barrier_before_reuse_is_a_race() -> None:
    """Write after read: the second round overwrites what a slower warp still reads."""
    again = "{} st.shared.u32 [%r4], %r6;"
    run(SHARED_EXCHANGE.format("bar.sync 0;") + again.format("bar.sync 0;"), block=64)
    with pytest.raises(DataRace, match=r"weak write by .* and a weak read by"):
        run(SHARED_EXCHANGE.format("bar.sync 0;") + again.format(""), block=64)


def test_ctas_that_write_one_place_are_a_race_unless_they_write_the_same() -> None:
    machine = Machine()
    x = machine.zeros(1, torch.int32)
    address = "ld.param.u64 %d1, [x]; mov.u32 %r1, %ctaid.x;"
    with pytest.raises(DataRace, match="weak write"):
        run(address + "st.global.u32 [%d1], %r1;", x, machine=machine, grid=3, block=1)
    run(address + "st.global.u32 [%d1], 7;", x, machine=machine, grid=3, block=1)
    run(address + "red.global.add.u32 [%d1], 7;", x, machine=machine, grid=3, block=1)
    assert x.item() == 28


def test_lanes_of_one_store_that_collide_are_a_race() -> None:
    machine = Machine()
    x = machine.zeros(1, torch.int32)
    with pytest.raises(DataRace, match=r"thread \d+ and a weak write by"):
        run("ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; st.global.u32 [%d1], %r1;", x, machine=machine)


def test_barriers() -> None:
    tid = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16;"
    with pytest.raises(BarrierError, match="different instructions"):
        run(tid + "@%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; B:")
    with pytest.raises(Deadlock, match="waits for barrier 1"):
        run("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; A:", block=64)
    with pytest.raises(BarrierError, match="no multiple of 32"):
        run("bar.sync 1, 20;")


def test_shuffles_from_lanes_that_take_no_part() -> None:
    tid = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 12; @%p1 bra END;"
    run(tid + "shfl.sync.bfly.b32 %r2, %r1, 3, 31, -1; END:", block=32)
    with pytest.raises(WarpSyncError, match="lane 8 reads lane 12"):
        run(tid + "shfl.sync.bfly.b32 %r2, %r1, 4, 31, 0xfff; END: bar.sync 0;", block=32)
    with pytest.raises(WarpSyncError, match="does not name it"):
        run("mov.u32 %r1, %tid.x; shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xff;")


def test_a_failing_schedule_replays_from_its_seed() -> None:
    """The message carries the seed, and the same seed fails in the same way."""
    machine = Machine()
    x = machine.zeros(8, torch.int32, name="x")
    body = "ld.param.u64 %d1, [x]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0; st.global.u32 [%d1], %r1;"
    messages = []
    for _ in range(2):
        with pytest.raises(PtxError, match="replay with seed=123") as caught:
            run(body, x, machine=machine, grid=6, block=1, seed=123)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
