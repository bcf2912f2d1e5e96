"""Shuffles, votes, matches and reductions inside warps, and divergence."""

import numpy as np
import pytest
import torch

from tests.ptx.evaluate import evaluate
from tests.ptx.machine import Machine
from tests.ptx.source import kernel, launch

LANES = np.arange(64, dtype=np.uint32)
VALUES = (LANES * 7 + 3).astype(np.uint32)


def shuffle_reference(mode: str, lane: int, value: int, control: int) -> tuple[int, bool]:
    """(source lane, predicate) as the PTX manual's pseudo-code computes them."""
    segment, clamp = control >> 8 & 31, control & 31
    top, bottom = lane & segment | clamp & ~segment & 31, lane & segment
    if mode == "up":
        source = lane - value
        valid = source >= top
    elif mode == "down":
        source = lane + value
        valid = source <= top
    elif mode == "bfly":
        source = lane ^ value
        valid = source <= top
    else:
        source = bottom | value & ~segment & 31
        valid = source <= top
    return (source if valid else lane), valid


@pytest.mark.parametrize("control", [31, 0, 0x1F00 | 31, 0x181F, 0x1C1F, 0x1807, 7])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("by", [0, 1, 3, 16, 31])
def test_shuffle(mode: str, by: int, control: int) -> None:
    got = evaluate(
        f"shfl.sync.{mode}.b32 %r1|%p1, {{a}}, {by}, {control}, -1; selp.b32 %r2, 0x10000, 0, %p1; or.b32 {{d}}, %r1, %r2;",
        ("b32",), "b32", VALUES,
    )  # fmt: skip
    expected = []
    for thread in range(64):
        source, valid = shuffle_reference(mode, thread % 32, by, control)
        expected.append(int(VALUES[thread - thread % 32 + source]) | (0x10000 if valid else 0))
    assert got.tolist() == expected


def test_shuffle_by_a_different_amount_in_each_lane() -> None:
    by = (LANES * 5 % 32).astype(np.uint32)
    got = evaluate("shfl.sync.idx.b32 {d}, {a}, {b}, 31, -1;", ("b32", "b32"), "b32", VALUES, by, block=64)
    assert got.tolist() == [int(VALUES[t - t % 32 + by[t]]) for t in range(64)]


def test_votes() -> None:
    odd = LANES % 2 == 1
    got = evaluate("vote.sync.ballot.b32 {d}, {a}, -1;", ("pred",), "b32", odd, block=64)
    assert set(got.tolist()) == {0xAAAAAAAA}
    first = LANES < 32
    for mode, expected in (("all", first), ("any", first), ("uni", np.ones(64, bool))):
        got = evaluate(f"vote.sync.{mode}.pred {{d}}, {{a}}, -1;", ("pred",), "pred", first, block=64)
        assert got.tolist() == expected.tolist()
    assert evaluate("vote.sync.uni.pred {d}, {a}, -1;", ("pred",), "pred", odd, block=64).tolist() == [False] * 64


def test_matches() -> None:
    keys = (LANES % 3).astype(np.uint32)
    got = evaluate("match.any.sync.b32 {d}, {a}, -1;", ("b32",), "b32", keys, block=64)
    assert got.tolist() == [sum(1 << i for i in range(32) if keys[t - t % 32 + i] == keys[t]) for t in range(64)]
    same = (LANES // 32).astype(np.uint32)
    got = evaluate("match.all.sync.b32 {d}|%p1, {a}, -1; selp.b32 {d}, {d}, 9, %p1;", ("b32",), "b32", same, block=64)
    assert set(got.tolist()) == {0xFFFFFFFF}


@pytest.mark.parametrize("name", ["add", "min", "max", "and", "or", "xor"])
def test_integer_reductions(name: str) -> None:
    kind = "b32" if name in ("and", "or", "xor") else "s32"
    values = VALUES.view(np.int32) * np.where(LANES % 2, -1, 1).astype(np.int32)
    got = evaluate(f"redux.sync.{name}.{kind} {{d}}, {{a}}, -1;", (kind,), "s32", values, block=64)
    reduce = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]
    assert got.tolist() == np.repeat([reduce.reduce(values[:32]), reduce.reduce(values[32:])], 32).tolist()


def test_float_reduction_with_nan() -> None:
    values = VALUES.astype(np.float32)
    values[5] = np.nan
    got = evaluate("redux.sync.max.f32 {d}, {a}, -1;", ("f32",), "f32", values, block=64)
    assert got.tolist() == [float(VALUES[31])] * 32 + [float(VALUES[63])] * 32
    got = evaluate("redux.sync.min.NaN.f32 {d}, {a}, -1;", ("f32",), "f32", values, block=64)
    assert np.isnan(got[:32]).all()


def test_elect_and_masks() -> None:
    got = evaluate("elect.sync {d}|%p1, -1; selp.b32 {d}, 1, 0, %p1;", (), "b32", block=64)
    assert got.tolist() == ([1] + [0] * 31) * 2
    got = evaluate("mov.u32 {d}, %lanemask_lt;", (), "b32", block=64)
    assert got.tolist() == [(1 << t % 32) - 1 for t in range(64)]


DIVERGENT = """
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; mov.u32 %r3, 0; mov.u32 %r4, 0;
    LOOP: setp.ge.u32 %p1, %r4, %r1; @%p1 bra END;
    setp.eq.u32 %p2, %r2, 1; @%p2 bra ODD; add.u32 %r3, %r3, 10; bra NEXT;
    ODD: add.u32 %r3, %r3, 1;
    NEXT: add.u32 %r4, %r4, 1; bra LOOP;
    END: {} mov.b32 {{d}}, %r3;
"""


@pytest.mark.parametrize("seed", range(6))
def test_lanes_diverge_and_meet_again(seed: int) -> None:
    """A loop with another trip count in each lane and a branch inside, then a shuffle that needs all lanes."""
    alone = [t * (1 if t % 4 == 1 else 10) for t in range(64)]
    got = evaluate(DIVERGENT.format("shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1;"), (), "b32", block=64, seed=seed)
    assert got.tolist() == [alone[t ^ 1] for t in range(64)]


def test_indexed_branches() -> None:
    body = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; bra GO;
        TABLE: .branchtargets ZERO, ONE, TWO, ONE;
        GO: brx.idx %r2, TABLE;
        ZERO: mov.b32 {d}, 100; bra END; ONE: mov.b32 {d}, 101; bra END; TWO: mov.b32 {d}, 102; END: bar.warp.sync -1;"""
    got = evaluate(body, (), "b32", block=64, seed=3)
    assert got.tolist() == [(100, 101, 102, 101)[t % 4] for t in range(64)]


@pytest.mark.parametrize("seed", range(4))
def test_halves_of_a_warp_shuffle_apart(seed: int) -> None:
    body = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 16; setp.eq.u32 %p1, %r2, 0; @%p1 bra LOW;
        shfl.sync.bfly.b32 {d}, %r1, 8, 31, 0xffff0000; bra END;
        LOW: shfl.sync.bfly.b32 {d}, %r1, 4, 31, 0xffff; END:"""
    got = evaluate(body, (), "b32", block=64, seed=seed)
    assert got.tolist() == [t ^ 8 if t & 16 else t ^ 4 for t in range(64)]


def test_one_lane_waits_for_another_of_its_warp() -> None:
    """Independent thread scheduling: a lane that spins does not starve the lane that it waits for."""
    program = kernel(
        """ld.param.u64 %d1, [flag]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra SET;
        SPIN: ld.acquire.cta.global.u32 %r2, [%d1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra END;
        SET: setp.ne.u32 %p3, %r1, 17; @%p3 bra END; st.release.cta.global.u32 [%d1], %r1; END:""",
        ("u64 flag",),
    )
    for seed in range(5):
        machine = Machine()
        flag = machine.zeros(1, torch.int32)
        machine.run([launch(program, flag)], seed=seed)
        assert flag.item() == 17


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    program = kernel(
        """ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d1, %d2;
        redux.sync.add.s32 %r2, %r1, -1; bar.sync 0; st.global.u32 [%d2], %r2;""",
        ("u64 out",),
    )
    machine = Machine()
    out = machine.zeros(40, torch.int32)
    machine.run([launch(program, out, block=40)])
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 40))] * 8


def test_labels_belong_to_their_scope() -> None:
    """Two scopes with the same label, each used before it appears, as inlined assembly has them."""
    scope = "{{ .reg .pred P; setp.lt.u32 P, {a}, %d; @P bra DONE; add.u32 %%r31, %%r31, %d; DONE: }}"
    text = "mov.u32 %r31, 0; " + scope % (50, 1) + scope % (100, 10) + " mov.u32 {d}, %r31;"
    got = evaluate(text, ("b32",), "b32", VALUES)
    assert got.tolist() == [int(v >= 50) + 10 * int(v >= 100) for v in VALUES]
