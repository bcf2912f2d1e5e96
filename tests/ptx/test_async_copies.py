"""mbarriers, cp.async, bulk copies and their proxy fence."""

import numpy as np
import pytest
import torch

from tests.ptx.errors import BarrierError, DataRace, Misaligned, MissingProxyFence
from tests.ptx.machine import Machine
from tests.ptx.source import kernel, launch

SHARED = ".shared .align 128 .b8 stage[1024]; .shared .align 8 .b8 full[8]; .shared .align 8 .b8 empty[8];"
TID = "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out]; mul.wide.u32 %d3, %r1, 16; add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3; shl.b32 %r2, %r1, 4; mov.u32 %r3, stage; add.u32 %r4, %r3, %r2; mov.u32 %r5, full; setp.eq.u32 %p1, %r1, 0;"
OUT = "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r6]; st.global.v4.u32 [%d5], {%r20, %r21, %r22, %r23};"


def copy(body: str, seed: int = 0, **options: object) -> bool:
    """Runs a 64-thread kernel that copies 1 KB from x to out through shared memory."""
    machine = Machine()
    x, out = machine.tensor(torch.arange(256, dtype=torch.int32)), machine.zeros(256, torch.int32)
    machine.run(
        [launch(kernel(TID + body, ("u64 x", "u64 out"), declarations=SHARED), x, out, block=64)], seed=seed, **options
    )  # type: ignore[arg-type]
    return torch.equal(out, x)


def cp_async(wait: str = "cp.async.wait_group 0;", sync: str = "bar.sync 0;") -> str:
    return f"""cp.async.cg.shared.global [%r4], [%d4], 16; cp.async.commit_group; {wait} {sync}
        xor.b32 %r6, %r2, 512; add.u32 %r6, %r3, %r6; xor.b32 %r7, %r1, 32; mul.wide.u32 %d6, %r7, 16; add.u64 %d5, %d2, %d6; {OUT}"""


def test_cp_async_needs_its_wait_and_a_barrier() -> None:
    for seed in range(5):
        assert copy(cp_async(), seed)
        assert not copy(cp_async(wait=""), seed, races="off")
    with pytest.raises(DataRace):
        all(copy(cp_async(sync=""), seed) for seed in range(10))


def test_cp_async_groups_finish_in_order_and_zero_fill() -> None:
    body = f"""mov.u32 %r10, 8; cp.async.ca.shared.global [%r4], [%d4], 8, %r10; cp.async.commit_group;
        cp.async.ca.shared.global [%r4+8], [%d4+8], 8, 0; cp.async.commit_group; {{wait}} mov.u32 %r6, %r4; {OUT}"""
    machine = Machine()
    x, out = machine.tensor(torch.arange(1, 257, dtype=torch.int32)), machine.zeros(256, torch.int32)
    for left in (1, 0):
        program = kernel(
            TID
            + body.replace("{wait}", f"st.shared.v2.u32 [%r4+8], {{7, 7}}; cp.async.wait_group {left};").replace(
                "{7, 7}", "{%r10, %r10}"
            ),
            ("u64 x", "u64 out"),
            declarations=SHARED,
        )
        machine.run([launch(program, x, out, block=64)])
        rows = out.view(64, 4)
        assert torch.equal(rows[:, :2], x.view(64, 4)[:, :2])
        assert (rows[:, 2:] == (8 if left else 0)).all()


def test_a_cache_policy_is_no_number_of_bytes() -> None:
    policy = "mov.b64 %d6, 0x12F0000000000000; "
    hinted = cp_async().replace("global [%r4], [%d4], 16", "global.L2::cache_hint [%r4], [%d4], 16, %d6")
    assert hinted != cp_async()
    assert copy(policy + hinted, 0)


INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r5], {count}; {fence} bar.sync 0;"


def bulk_load(expect: str = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 1024;", wait: bool = True) -> str:
    """Thread 0 fetches 1 KB; everybody waits for the mbarrier by parity."""
    spin = "SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; @!%p2 bra SPIN;" if wait else ""
    return f"""{INIT.format(count=1, fence="fence.mbarrier_init.release.cluster;")}
        @!%p1 bra WAIT; {expect}
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d1], 1024, [%r5];
        WAIT: {spin} mov.u32 %r6, %r4; {OUT}"""


def test_bulk_load_with_transaction_bytes() -> None:
    for seed in range(10):
        assert copy(bulk_load(), seed)
    assert not all(copy(bulk_load(wait=False), seed, races="off") for seed in range(10))
    assert not all(
        copy(bulk_load(expect="mbarrier.arrive.shared::cta.b64 _, [%r5];"), seed, races="off") for seed in range(10)
    )
    with pytest.raises(DataRace, match=r"cp.async.bulk(.|\n)*thread 0\)"):
        all(copy(bulk_load(wait=False), seed) for seed in range(20))


def bulk_store(
    fence: str = "fence.proxy.async.shared::cta;",
    sync: str = "bar.sync 0;",
    commit: str = "cp.async.bulk.commit_group;",
) -> str:
    return f"""ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d4]; st.shared.v4.u32 [%r4], {{%r20, %r21, %r22, %r23}};
        {fence} {sync} @!%p1 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r3], 1024; {commit} cp.async.bulk.wait_group 0; END:"""


def test_bulk_store_needs_a_proxy_fence_and_a_barrier() -> None:
    for seed in range(5):
        assert copy(bulk_store(), seed)
    with pytest.raises(MissingProxyFence):
        copy(bulk_store(fence=""))
    with pytest.raises((DataRace, MissingProxyFence)):
        all(copy(bulk_store(sync=""), seed) for seed in range(10))


def test_a_buffer_may_be_reused_only_after_the_copy_has_read_it() -> None:
    reuse = "@%p1 st.shared.u32 [%r3], %r1;"
    waits = bulk_store().replace(
        "cp.async.bulk.wait_group 0; END:", f"cp.async.bulk.wait_group.read 0; END: {reuse.replace('%r1', '%r20')}"
    )
    hasty = bulk_store().replace("cp.async.bulk.wait_group 0; END:", "END: @%p1 st.shared.u32 [%r3], 99;")
    assert all(copy(waits, seed) for seed in range(10))
    assert not all(copy(hasty, seed, races="off") for seed in range(10))


@pytest.mark.parametrize("seed", range(6))
def test_producer_and_consumer_with_two_mbarriers(seed: int) -> None:
    """Warp 0 fills a stage of 512 bytes four times; warp 1 empties it; full and empty flip their parity each time."""
    body = """mov.u32 %r7, empty; @%p1 mbarrier.init.shared.b64 [%r5], 1; @%p1 mbarrier.init.shared.b64 [%r7], 32; bar.sync 0;
        mov.u32 %r8, 0; setp.ge.u32 %p3, %r1, 32; @%p3 bra CONSUME;
        PRODUCE: xor.b32 %r9, %r8, 1; and.b32 %r9, %r9, 1;
        E: mbarrier.test_wait.parity.shared.b64 %p2, [%r7], %r9; @!%p2 bra E;
        mul.wide.u32 %d7, %r8, 512; add.u64 %d8, %d1, %d7;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
        @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%d8], 512, [%r5];
        add.u32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, 4; @%p2 bra PRODUCE; bra END;
        CONSUME: and.b32 %r9, %r8, 1;
        F: mbarrier.try_wait.parity.shared.b64 %p2, [%r5], %r9; @!%p2 bra F;
        sub.u32 %r6, %r4, 512; ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r6];
        mul.wide.u32 %d7, %r8, 512; add.u64 %d8, %d5, %d7; sub.u64 %d8, %d8, 512; st.global.v4.u32 [%d8], {%r20, %r21, %r22, %r23};
        EMPTIED
        add.u32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, 4; @%p2 bra CONSUME; END:"""
    machine = Machine()
    x, out = machine.tensor(torch.arange(512, dtype=torch.int32)), machine.zeros(512, torch.int32)
    program = kernel(
        TID + body.replace("EMPTIED", "mbarrier.arrive.shared.b64 %d9, [%r7];"),
        ("u64 x", "u64 out"),
        declarations=SHARED,
    )
    machine.run([launch(program, x, out, block=64)], seed=seed)
    assert torch.equal(out, x)


def test_misuse() -> None:
    with pytest.raises(BarrierError, match="no mbarrier was initialised"):
        copy("mbarrier.arrive.shared.b64 %d9, [%r5];")
    with pytest.raises(BarrierError, match="expects 1 more"):
        copy(INIT.format(count=1, fence="") + "mbarrier.arrive.shared.b64 %d9, [%r5], 2;")
    with pytest.raises(Misaligned):
        copy(
            INIT.format(count=1, fence="")
            + "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%d1], 100, [%r5];"
        )
    with pytest.raises((BarrierError, DataRace)):
        all(
            copy("@%p1 mbarrier.init.shared.b64 [%r5], 64; mbarrier.arrive.shared.b64 %d9, [%r5];", s, gang_warps=1)
            for s in range(9)
        )


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("block", [32, 64])
def test_matrix_multiply_through_ldmatrix(kind: str, dtype: torch.dtype, block: int) -> None:
    """A (16x16 by rows) and B (8x16, its transpose by rows) from shared memory; D = A·Bᵀ + C in fp32. By the first
    warp, whatever the second is about."""
    program = kernel(
        f"""mov.u32 %r1, %tid.x; setp.ge.u32 %p9, %r1, 32; @%p9 bra OTHER; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [c]; mov.u32 %r3, stage;
        mul.wide.u32 %d4, %r1, 16; add.u64 %d5, %d1, %d4; ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d5]; shl.b32 %r4, %r1, 4; add.u32 %r5, %r3, %r4;
        st.shared.v4.u32 [%r5], {{%r20, %r21, %r22, %r23}};
        setp.lt.u32 %p1, %r1, 16; add.u64 %d6, %d2, %d4; @%p1 ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d6]; @%p1 st.shared.v4.u32 [%r5+512], {{%r20, %r21, %r22, %r23}};
        bar.sync 0;
        and.b32 %r6, %r1, 15; shl.b32 %r6, %r6, 5; shr.u32 %r7, %r1, 4; shl.b32 %r7, %r7, 4; add.u32 %r8, %r3, %r6; add.u32 %r8, %r8, %r7;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r30, %r31, %r32, %r33}}, [%r8];
        and.b32 %r9, %r1, 7; shl.b32 %r9, %r9, 5; shr.u32 %r10, %r1, 3; and.b32 %r10, %r10, 1; shl.b32 %r10, %r10, 4; add.u32 %r11, %r3, %r9; add.u32 %r11, %r11, %r10;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r34, %r35}}, [%r11+512];
        shr.u32 %r12, %r1, 2; and.b32 %r13, %r1, 3; shl.b32 %r13, %r13, 1; mad.lo.u32 %r14, %r12, 8, %r13; mul.wide.u32 %d7, %r14, 4; add.u64 %d8, %d3, %d7;
        ld.global.v2.f32 {{%f1, %f2}}, [%d8]; ld.global.v2.f32 {{%f3, %f4}}, [%d8+256];
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f1, %f2, %f3, %f4}}, {{%r30, %r31, %r32, %r33}}, {{%r34, %r35}}, {{%f1, %f2, %f3, %f4}};
        st.global.v2.f32 [%d8], {{%f1, %f2}}; st.global.v2.f32 [%d8+256], {{%f3, %f4}}; bra END;
        OTHER: bar.sync 0; END: ret;""",
        ("u64 a", "u64 b", "u64 c"),
        declarations=SHARED,
    )  # fmt: skip
    machine = Machine()
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.randn(16, 8)
    held = [machine.tensor(t) for t in (a, b, c)]
    machine.run([launch(program, *held, block=block)])
    exact = (a.double() @ b.double().T + c.double()).float()
    assert torch.equal(held[2], exact)


def test_stmatrix_is_the_inverse_of_ldmatrix() -> None:
    body = (
        """ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d4]; st.shared.v4.u32 [%r4], {%r20, %r21, %r22, %r23}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r30, %r31, %r32, %r33}, [%r4]; bar.sync 0;
        stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r4], {%r30, %r31, %r32, %r33}; bar.sync 0; mov.u32 %r6, %r4; """
        + OUT
    )
    assert copy(body)
    machine = Machine()
    x, out = machine.tensor(np.arange(64 * 8, dtype=np.int16)), machine.zeros(64 * 8, torch.int16)
    text = body.replace("stmatrix.sync.aligned.m8n8.x4.trans", "stmatrix.sync.aligned.m8n8.x4")
    machine.run([launch(kernel(TID + text, ("u64 x", "u64 out"), declarations=SHARED), x, out, block=64)])
    assert torch.equal(out.view(8, 8, 8), x.view(8, 8, 8).transpose(1, 2))


def test_movmatrix_transposes() -> None:
    """As what ldmatrix does when it reads the same matrix with and without .trans."""
    body = (
        """ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d4]; st.shared.v4.u32 [%r4], {%r20, %r21, %r22, %r23}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r30, %r31, %r32, %r33}, [%r4]; bar.sync 0;
        """
        + "".join(f"movmatrix.sync.aligned.m8n8.trans.b16 %r{n}, %r{n}; " for n in range(30, 34))
        + "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%r30, %r31, %r32, %r33}; bar.sync 0; mov.u32 %r6, %r4; "
        + OUT
    )
    assert copy(body)
