"""Scopes of the memory model, and which threads each one joins."""

from dataclasses import dataclass

from tests.ptx.number_formats import Array

WEAK, CTA, CLUSTER, GPU, SYS = range(5)
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": SYS}
SCOPE_NAMES = ("weak", "cta", "cluster", "gpu", "sys")


@dataclass(frozen=True)
class Topology:
    """By thread number of a run: its CTA, cluster, GPU and launch; by CTA number: its first thread."""

    cta: Array
    cluster: Array
    gpu: Array
    launch: Array
    first_thread: Array
    agents: int
    """Numbers from here on are the CTAs' asynchronous agents, which write for cp.async.bulk."""

    def common(self, a: int, b: int) -> int:
        """The narrowest scope that includes both threads."""
        if self.cta[a] == self.cta[b]:
            return CTA
        if self.cluster[a] == self.cluster[b]:
            return CLUSTER
        return GPU if self.gpu[a] == self.gpu[b] else SYS

    def name(self, thread: int) -> str:
        if thread < 0:
            return "the host"
        cta = int(self.cta[thread])
        if thread >= self.agents:
            return f"an asynchronous copy of GPU {int(self.gpu[thread])} CTA #{cta}"
        return f"GPU {int(self.gpu[thread])} CTA #{cta} thread {thread - int(self.first_thread[cta])}"
