"""Loads and stores of all widths and spaces, atomic operations, multicast, clusters and dependent launches."""

import numpy as np
import pytest
import torch

from tests.ptx.errors import DataRace, OutOfBounds
from tests.ptx.machine import Machine
from tests.ptx.program import Program
from tests.ptx.source import kernel, launch

TID = "mov.u32 %r1, %tid.x; "


@pytest.mark.parametrize(("kind", "dtype"), [("u8", "u1"), ("s8", "i1"), ("u16", "u2"), ("s16", "i2"), ("b32", "u4")])
def test_narrow_loads_extend(kind: str, dtype: str) -> None:
    machine = Machine()
    values = np.random.default_rng(0).integers(0, 256, 32 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    x, out = machine.tensor(values.view(np.uint8)), machine.zeros(32, torch.int64)
    size = np.dtype(dtype).itemsize
    machine.run([launch(kernel(
        f"""ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out]; {TID} mul.wide.u32 %d3, %r1, {size}; add.u64 %d3, %d1, %d3;
        ld.global.{kind} %d4, [%d3]; mul.wide.u32 %d5, %r1, 8; add.u64 %d5, %d2, %d5; st.global.b64 [%d5], %d4;""",
        ("u64 x", "u64 out")), x, out)])  # fmt: skip
    assert out.tolist() == values.astype(np.int64).tolist()


@pytest.mark.parametrize(
    ("vector", "bits"), [("v2", 8), ("v4", 8), ("v4", 16), ("v2", 32), ("v4", 32), ("v8", 32), ("v2", 64), ("v4", 64)]
)
def test_vector_accesses(vector: str, bits: int) -> None:
    """A copy in which each lane reverses the elements of its vector."""
    count = int(vector[1])
    file = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}[bits]
    names = [f"{file}{20 + i}" for i in range(count)]
    machine = Machine()
    data = np.random.default_rng(0).integers(0, 256, 32 * count * bits // 8, dtype=np.uint8)
    x, out = machine.tensor(data), machine.zeros(len(data), torch.uint8)
    machine.run([launch(kernel(
        f"""ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out]; {TID} mul.wide.u32 %d3, %r1, {count * bits // 8};
        add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3; ld.global.{vector}.b{bits} {{{", ".join(names)}}}, [%d4];
        st.global.{vector}.b{bits} [%d5], {{{", ".join(reversed(names))}}};""",
        ("u64 x", "u64 out")), x, out)])  # fmt: skip
    expected = data.view(f"u{bits // 8}").reshape(32, count)[:, ::-1]
    assert np.array_equal(out.numpy().view(f"u{bits // 8}").reshape(32, count), expected)


def test_generic_addresses_of_every_space() -> None:
    """One store each through a generic pointer to shared and local memory, read back by its own space; a constant table."""
    declarations = ".const .align 4 .b32 table[4] = {10, 20, 30, 40}; .shared .align 16 .b8 buffer[256];"
    program = kernel(
        f""".local .align 8 .b8 depot[16]; .reg .b64 %SPL;
        ld.param.u64 %d1, [out]; {TID} shl.b32 %r2, %r1, 2;
        mov.u64 %d2, buffer; cvta.shared.u64 %d2, %d2; cvt.u64.u32 %d3, %r2; add.u64 %d2, %d2, %d3;
        add.u32 %r3, %r1, 5; st.u32 [%d2], %r3; mov.u32 %r4, buffer; add.u32 %r4, %r4, %r2; ld.shared.u32 %r5, [%r4];
        mov.u64 %SPL, depot; cvta.local.u64 %d4, %SPL; st.u32 [%d4+4], %r1; ld.local.u32 %r6, [%SPL+4];
        and.b32 %r7, %r1, 3; mul.wide.u32 %d5, %r7, 4; mov.u64 %d6, table; add.u64 %d6, %d6, %d5; ld.const.u32 %r8, [%d6];
        add.u32 %r9, %r5, %r6; add.u32 %r9, %r9, %r8; add.u64 %d7, %d1, %d3; st.global.u32 [%d7], %r9;
        isspacep.shared %p1, %d2; @!%p1 trap; isspacep.shared %p1, %d1; @%p1 trap;""",
        ("u64 out",),
        declarations=declarations,
    )
    machine = Machine()
    out = machine.zeros(64, torch.int32)
    machine.run([launch(program, out, block=64)])
    assert out.tolist() == [t + 5 + t + (10, 20, 30, 40)[t % 4] for t in range(64)]


ATOMICS = {
    "add.u32": lambda values, start: (start + values.sum()) % 2**32,
    "min.s32": lambda values, start: min(start, values.min()),
    "max.u32": lambda values, start: max(start, values.max()),
    "and.b32": lambda values, start: start & np.bitwise_and.reduce(values),
    "or.b32": lambda values, start: start | np.bitwise_or.reduce(values),
    "xor.b32": lambda values, start: start ^ np.bitwise_xor.reduce(values),
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomic_operations_by_all_threads_at_once(name: str, space: str) -> None:
    """64 threads of 2 CTAs on one word; every one gets another old value where the operation makes them differ."""
    machine = Machine()
    x, out = machine.tensor(np.array([5], np.int32)), machine.zeros(1, torch.int32)
    body = "ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out];" + TID + "add.u32 %r2, %r1, 3;"
    if space == "global":
        body += f"red.global.{name} [%d1], %r2; "
    else:
        body += f"""mov.u32 %r3, word; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r3], 5; bar.sync 0;
            atom.shared.{name} %r4, [%r3], %r2; bar.sync 0; ld.shared.u32 %r5, [%r3]; @%p1 st.global.u32 [%d1], %r5;"""
    program = kernel(body, ("u64 x", "u64 out"), declarations=".shared .align 4 .b8 word[4];")
    machine.run([launch(program, x, out, block=64)], seed=3)
    assert x.item() == ATOMICS[name](np.arange(64) + 3, 5)


def test_old_values_of_an_atomic_counter_are_all_different() -> None:
    machine = Machine()
    counter, out = machine.zeros(1, torch.int32), machine.zeros(128, torch.int32)
    program = kernel(
        TID
        + """ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out]; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 64, %r1;
        atom.global.add.u32 %r4, [%d1], 1; mul.wide.u32 %d3, %r3, 4; add.u64 %d3, %d2, %d3; st.global.u32 [%d3], %r4;""",
        ("u64 x", "u64 out"),
    )
    machine.run([launch(program, counter, out, grid=2, block=64)], seed=1)
    assert sorted(out.tolist()) == list(range(128))


def test_compare_and_swap_and_exchange() -> None:
    machine = Machine()
    x, out = machine.tensor(np.array([7, 7, 7], np.int32)), machine.zeros(3, torch.int32)
    program = kernel(
        """ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out]; atom.global.cas.b32 %r1, [%d1], 7, 9; st.global.u32 [%d2], %r1;
        atom.global.cas.b32 %r1, [%d1+4], 8, 9; st.global.u32 [%d2+4], %r1; atom.global.exch.b32 %r1, [%d1+8], 1; st.global.u32 [%d2+8], %r1;""",
        ("u64 x", "u64 out"),
    )
    machine.run([launch(program, x, out, block=1)])
    assert (x.tolist(), out.tolist()) == ([9, 7, 1], [7, 7, 7])


def test_float_and_vector_reductions() -> None:
    machine = Machine()
    x = machine.zeros(4, torch.float32)
    y = machine.tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16())
    program = kernel(
        """ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y]; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000;
        red.global.add.v4.f32 [%d1], {%f1, %f2, %f1, %f2}; mov.b32 %r1, 0x40003F80; red.global.add.noftz.v2.bf16x2 [%d2], {%r1, %r1};""",
        ("u64 x", "u64 y"),
    )
    machine.run([launch(program, x, y, block=32)])
    assert x.tolist() == [32.0, 64.0, 32.0, 64.0]
    assert y.tolist() == [33.0, 66.0, 35.0, 68.0]


def all_reduce(release: str = "release", acquire: str = "acquire", wait: bool = True) -> str:
    """One-shot over multicast: announce by multimem.red, wait for all, ld_reduce own slice, multimem.st the sum."""
    spin = f"SPIN: ld.{acquire}.sys.global.u32 %r5, [%d3]; setp.lt.u32 %p1, %r5, %r9; @%p1 bra SPIN;"
    return f"""
        ld.param.u64 %d1, [mc]; ld.param.u64 %d2, [mc_flag]; ld.param.u64 %d3, [flag]; ld.param.u64 %d4, [mine];
        ld.param.u32 %r8, [rank]; ld.param.u32 %r9, [world]; {TID}
        mad.lo.u32 %r2, %r8, 32, %r1; mul.wide.u32 %d5, %r1, 16; mul.wide.u32 %d6, %r2, 16;
        mul.wide.u32 %d10, %r9, 1; mov.u32 %r3, 0;
        FILL: mad.lo.u32 %r4, %r3, 32, %r1; mul.wide.u32 %d7, %r4, 16; add.u64 %d7, %d4, %d7; add.u32 %r10, %r8, 1;
        cvt.rn.f32.u32 %f1, %r10; cvt.rn.bf16x2.f32 %r11, %f1, %f1; st.global.v4.b32 [%d7], {{%r11, %r11, %r11, %r11}};
        add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, %r9; @%p2 bra FILL;
        bar.sync 0; setp.ne.u32 %p3, %r1, 0; @%p3 bra READY;
        multimem.red.{release}.sys.global.add.u32 [%d2], 1;
        {spin if wait else ""}
        READY: bar.sync 0; add.u64 %d8, %d1, %d6;
        multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {{%r20, %r21, %r22, %r23}}, [%d8];
        multimem.st.relaxed.sys.global.v4.bf16x2 [%d8], {{%r20, %r21, %r22, %r23}};
        """  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_multicast_all_reduce(seed: int) -> None:
    world = 4
    machine = Machine()
    data = [machine.zeros(world * 32 * 8, torch.bfloat16, gpu=g) for g in range(world)]
    flags = [machine.zeros(1, torch.int32, gpu=g) for g in range(world)]
    mc, mc_flag = machine.multicast(data), machine.multicast(flags)
    params = ("u64 mc", "u64 mc_flag", "u64 flag", "u64 mine", "u32 rank", "u32 world")

    def run(program_text: str, seed: int) -> None:
        program = kernel(program_text, params)
        for flag in flags:
            flag.zero_()
        machine.run([launch(program, mc, mc_flag, flags[g], data[g], g, world, gpu=g) for g in range(world)], seed=seed)

    run(all_reduce(), seed)
    for tensor in data:
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(1, world + 1))))
    for weakened in (all_reduce(release="relaxed"), all_reduce(acquire="relaxed"), all_reduce(wait=False)):
        with pytest.raises(DataRace):
            run(weakened, seed)


def test_shared_memory_of_the_cluster() -> None:
    """Each CTA of a cluster of 4 adds its rank + 1 to the counter of CTA 0, which all of them then read through mapa."""
    program = kernel(
        TID
        + """ld.param.u64 %d1, [out]; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, word; setp.ne.u32 %p1, %r1, 0; @%p1 bra SKIP;
        st.shared.u32 [%r3], 0;
        SKIP: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mapa.shared::cluster.u32 %r4, %r3, 0; add.u32 %r5, %r2, 1;
        red.relaxed.cluster.shared::cluster.add.u32 [%r4], %r5;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ld.shared::cluster.u32 %r6, [%r4]; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r8, %r7, 32, %r1; mul.wide.u32 %d2, %r8, 4; add.u64 %d2, %d1, %d2;
        st.global.u32 [%d2], %r6; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""",
        ("u64 out",),
        declarations=".shared .align 4 .b8 word[4];",
    )
    machine = Machine()
    out = machine.zeros(8 * 32, torch.int32)
    machine.run([launch(program, out, grid=8, cluster=(4, 1, 1))], seed=2)
    assert set(out.tolist()) == {32 * (1 + 2 + 3 + 4)}


def test_shared_memory_does_not_outlive_its_cta() -> None:
    """CTA 0 leaves at once; its peer still counts there."""
    program = kernel(
        "mov.u32 %r3, word; mapa.shared::cluster.u32 %r4, %r3, 0; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r2, 0; @%p1 bra END;"
        "red.relaxed.cluster.shared::cluster.add.u32 [%r4], 1; END:",
        declarations=".shared .align 4 .b8 word[4];",
    )
    with pytest.raises(OutOfBounds, match="after that CTA has left"):
        all(Machine().run([launch(program, grid=2, cluster=(2, 1, 1))], seed=seed) for seed in range(20))


def dependent(wait: str) -> tuple[Program, Program]:
    first = kernel(
        TID
        + """ld.param.u64 %d1, [x]; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d1, %d2;
        griddepcontrol.launch_dependents; add.u32 %r2, %r1, 1; st.global.u32 [%d2], %r2;""",
        ("u64 x",),
    )
    second = kernel(
        TID
        + f"""ld.param.u64 %d1, [x]; ld.param.u64 %d3, [out]; mul.wide.u32 %d2, %r1, 4; add.u64 %d4, %d1, %d2; add.u64 %d5, %d3, %d2;
        {wait} ld.global.nc.u32 %r2, [%d4]; st.global.u32 [%d5], %r2;""",
        ("u64 x", "u64 out"),
    )
    return first, second


@pytest.mark.parametrize("seed", range(5))
def test_a_dependent_launch_must_wait_before_it_reads(seed: int) -> None:
    machine = Machine()
    x, out = machine.zeros(32, torch.int32), machine.zeros(32, torch.int32)
    first, second = dependent("griddepcontrol.wait;")
    machine.run([launch(first, x), launch(second, x, out, overlaps=True)], seed=seed)
    assert out.tolist() == list(range(1, 33))


def test_a_dependent_launch_that_does_not_wait_is_caught() -> None:
    machine = Machine()
    first, second = dependent("")

    def run(seed: int) -> bool:
        x, out = machine.zeros(32, torch.int32), machine.zeros(32, torch.int32)
        machine.run([launch(first, x), launch(second, x, out, overlaps=True)], seed=seed, non_coherent=False)
        return True

    with pytest.raises(DataRace):
        all(run(seed) for seed in range(20))


def test_a_plain_second_launch_waits_for_the_first() -> None:
    machine = Machine()
    x, out = machine.zeros(32, torch.int32), machine.zeros(32, torch.int32)
    first, second = dependent("")
    machine.run([launch(first, x), launch(second, x, out)], seed=4)
    assert out.tolist() == list(range(1, 33))


PATIENT = "griddepcontrol.wait; griddepcontrol.launch_dependents;"
HASTY = "griddepcontrol.launch_dependents; griddepcontrol.wait;"


@pytest.mark.parametrize(
    ("between", "sound"), [([PATIENT, HASTY], True), ([HASTY, PATIENT], True), ([HASTY, HASTY], False)]
)
def test_what_was_complete_when_a_launch_began_is_for_the_next_one_too(between: list[str], *, sound: bool) -> None:
    """The last launch reads without a wait what the first one wrote."""
    machine = Machine()
    first, last = dependent("")
    chain = [launch(kernel(text), overlaps=True) for text in between]

    def run(seed: int) -> bool:
        x, out = machine.zeros(32, torch.int32), machine.zeros(32, torch.int32)
        machine.run([launch(first, x), *chain, launch(last, x, out, overlaps=True)], seed=seed, non_coherent=False)
        return out.tolist() == list(range(1, 33))

    if sound:
        assert all(run(seed) for seed in range(20))
    else:
        with pytest.raises(DataRace):
            all(run(seed) for seed in range(20))
