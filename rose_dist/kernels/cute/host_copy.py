"""Words copied between the host's memory and the GPU's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rose_dist.kernels import jit, vector
from rose_dist.kernels.arch import Arch
from rose_dist.kernels.dsl import Int32, Int64, Stream, cute

THREADS = 128


@cache
def launcher(arch: Arch, indirect: bool) -> jit.Launcher:
    return jit.load(CopyWords(arch, indirect))


@dataclass(frozen=True)
class CopyWords(jit.Kernel):
    """No launch begins before its end: some read what it brings before they wait for the one before them.

    indirect: the target's address stands where `target` points to; 0 there is none.
    """

    indirect: bool

    @cute.jit
    def __call__(self, source: Int64, target: Int64, words: Int32, stream: Stream) -> None:
        blocks = (words + (THREADS - 1)) // THREADS
        self.kernel(source, target, words).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, source: Int64, target: Int64, words: Int32) -> None:
        word = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        if self.indirect:
            target = Int64(vector.scalar(target, Int64)[0])
        if (word < words) & (target != 0):
            vector.scalar(target + Int64(word) * 8, Int64)[0] = vector.scalar(source + Int64(word) * 8, Int64)[0]
