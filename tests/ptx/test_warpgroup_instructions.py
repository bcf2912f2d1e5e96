"""wgmma: values against torch, and each of its rules broken once."""

import numpy as np
import pytest
import torch

from tests.ptx.errors import DataRace, MissingProxyFence, UnknownInstruction, WarpSyncError
from tests.ptx.machine import Machine
from tests.ptx.source import kernel, launch

SHARED = ".shared .align 128 .b8 cells[1024];"
PARAMS = ("u64 left", "u64 right", "u64 out")
# A thread's 8 words of two left operands, and (64 of them) 16 bytes of two right ones: cells [depth / 8, 16 columns].
SET_UP = """mov.u32 %r1, %tid.x; ld.param.u64 %d1, [left]; ld.param.u64 %d2, [right]; ld.param.u64 %d3, [out];
    mul.wide.u32 %d4, %r1, 32; add.u64 %d5, %d1, %d4; add.u64 %d6, %d3, %d4;
    ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d5]; ld.global.v4.u32 {%r24, %r25, %r26, %r27}, [%d5+16];
    setp.lt.u32 %p1, %r1, 64; mul.wide.u32 %d7, %r1, 16; add.u64 %d8, %d2, %d7; shl.b32 %r2, %r1, 4;
    mov.u32 %r3, cells; add.u32 %r4, %r3, %r2; @%p1 ld.global.v4.u32 {%r30, %r31, %r32, %r33}, [%d8];
    @%p1 st.shared.v4.u32 [%r4], {%r30, %r31, %r32, %r33};
    shr.u32 %r5, %r3, 4; add.u32 %r5, %r5, 1048576; add.u32 %r6, %r5, 32; mov.u32 %r7, 8;
    mov.b64 %d10, {%r5, %r7}; mov.b64 %d11, {%r6, %r7}; setp.eq.u32 %p2, 0, 0;"""
SUMS = ", ".join(f"%r{i}" for i in range(40, 48))
ZERO = " ".join(f"mov.b32 %r{i}, 0;" for i in range(40, 48))
PROXY, FENCE, COMMIT = "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
MEET = "bar.sync 0;"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
FIRST = f"{PRODUCT} {{{SUMS}}}, {{%r20, %r21, %r22, %r23}}, %d10, %p2, 1, 1, 0;"
SECOND = f"{PRODUCT} {{{SUMS}}}, {{%r24, %r25, %r26, %r27}}, %d11, %p2, 1, 1, 0;"
STORE = "st.global.v4.b32 [%d6], {%r40, %r41, %r42, %r43}; st.global.v4.b32 [%d6+16], {%r44, %r45, %r46, %r47};"
BOTH = (SET_UP, ZERO, PROXY, MEET, FENCE, FIRST, SECOND, COMMIT, WAIT, STORE)


def product(*body: str, seed: int = 0, transposed: bool = False) -> bool:
    """Whether 128 threads get [64, 32] times [32, 16] right; transposed, cells are [16 columns / 8, depth]."""
    torch.manual_seed(1)
    left, right = torch.randn(64, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    words = torch.empty(128, 2, 4, 2, dtype=torch.bfloat16)  # thread, product, word, neighbour
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        for i, (down, across) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for step in range(2):
                words[thread, step, i] = left[row + down, 16 * step + column + across :][:2]
    cells = right.view(32, 2, 8).transpose(0, 1) if transposed else right.view(4, 8, 16).transpose(1, 2)
    machine = Machine()
    operands = [machine.tensor(t.view(torch.int16).reshape(-1).numpy()) for t in (words, cells.contiguous())]
    out = machine.zeros((128, 8), torch.float32)
    machine.run([launch(kernel("\n".join(body), PARAMS, declarations=SHARED), *operands, out, block=128)], seed=seed)
    got = torch.empty(64, 16)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i, value in enumerate(out[thread]):
            tile, down, neighbour = i // 4, i // 2 % 2, i % 2
            got[16 * warp + lane // 4 + 8 * down, 8 * tile + 2 * (lane % 4) + neighbour] = value
    return bool(np.allclose(got, left.float() @ right.float(), atol=1e-5))


E4M3 = "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"


def test_products_of_e4m3_match_torch() -> None:
    torch.manual_seed(1)
    left, right = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((64, 64), (64, 16)))
    words = torch.empty(128, 2, 4, 4, dtype=torch.uint8)  # thread, product, word, neighbour
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        row, column = 16 * warp + lane // 4, 4 * (lane % 4)
        for i, (down, across) in enumerate(((0, 0), (8, 0), (0, 16), (8, 16))):
            for step in range(2):
                words[thread, step, i] = left[row + down, 32 * step + column + across :][:4].view(torch.uint8)
    cells = right.view(torch.uint8).view(4, 16, 16).transpose(1, 2).contiguous()
    machine = Machine()
    operands = [machine.tensor(t.reshape(-1).numpy()) for t in (words, cells)]
    out = machine.zeros((128, 8), torch.float32)
    body = "\n".join(part.replace(PRODUCT, E4M3).replace("1, 1, 0", "1, 1") for part in BOTH)
    machine.run([launch(kernel(body, PARAMS, declarations=SHARED), *operands, out, block=128)])
    wanted = left.float() @ right.float()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i, value in enumerate(out[thread]):
            tile, down, neighbour = i // 4, i // 2 % 2, i % 2
            found = wanted[16 * warp + lane // 4 + 8 * down, 8 * tile + 2 * (lane % 4) + neighbour]
            assert abs(float(value) - float(found)) < 1e-4


def without(*dropped: str) -> tuple[str, ...]:
    return tuple(part for part in BOTH if part not in dropped)


def test_products_match_torch() -> None:
    for seed in range(4):
        assert product(*BOTH, seed=seed)
    groups = (SET_UP, ZERO, PROXY, MEET, FENCE, FIRST, COMMIT, FENCE, SECOND, COMMIT, WAIT, STORE)
    assert product(*groups)


def test_a_transposed_right_operand() -> None:
    changes = (("1048576", "524288"), ("%r6, %r5, 32", "%r6, %r5, 16"), ("%r7, 8", "%r7, 32"), ("1, 1, 0", "1, 1, 1"))
    body = "\n".join(BOTH)
    for old, new in changes:
        body = body.replace(old, new)
    assert product(body, transposed=True)
    assert not product(body)


def test_a_product_that_does_not_add() -> None:
    """What the sums held, even the product before it, is gone."""
    start, end = (SET_UP, "setp.ne.u32 %p3, 0, 0;", PROXY, MEET, FENCE), (COMMIT, WAIT, STORE)
    first, second = FIRST.replace("%p2", "%p3"), SECOND.replace("%p2", "%p3")
    assert product(*start, first, SECOND, *end)
    assert product(*start, SECOND, first, SECOND, *end)
    assert not product(*start, ZERO, FIRST, second, *end)


def test_sums_are_not_there_before_the_wait() -> None:
    assert not product(*without(WAIT))
    only_the_first = (SET_UP, ZERO, PROXY, MEET, FENCE, FIRST, COMMIT, FENCE, SECOND, COMMIT, WAIT.replace("0", "1"))
    assert not product(*only_the_first, STORE)


@pytest.mark.parametrize(("register", "message"), [("%r20", "operand"), ("%r47", "sum")])
def test_registers_under_way_may_not_be_written(register: str, message: str) -> None:
    with pytest.raises(WarpSyncError, match=message):
        product(*BOTH[:-2], f"mov.b32 {register}, 7;", WAIT, STORE)


def test_shared_memory_under_way_may_not_be_written() -> None:
    with pytest.raises((DataRace, MissingProxyFence)):
        product(*BOTH[:-2], "@%p1 st.shared.v4.u32 [%r4], {%r31, %r30, %r32, %r33};", WAIT, STORE)


def test_fences_are_needed() -> None:
    with pytest.raises(MissingProxyFence):
        product(*without(PROXY))
    with pytest.raises(WarpSyncError, match=r"without a wgmma\.fence"):
        product(*without(FENCE))


@pytest.mark.parametrize(
    ("old", "new"), [("bf16.bf16", "f16.f16"), ("{%r20, %r21, %r22, %r23}", "%d10"), ("1, 1, 0", "-1, 1, 0")]
)
def test_other_forms_are_refused(old: str, new: str) -> None:
    with pytest.raises(UnknownInstruction):
        product(*(part.replace(old, new) for part in BOTH))
