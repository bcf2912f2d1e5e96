"""What can go wrong in an emulated run. Every error names the kernel, the PTX line and the thread where that is
known.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Where in which kernel, and which thread: the lane index is the thread's linear index in its CTA."""

    kernel: str
    line: int
    text: str
    gpu: int
    cta: int
    thread: int

    def __str__(self) -> str:
        return f"{self.kernel}:{self.line}: `{self.text}` (GPU {self.gpu}, CTA {self.cta}, thread {self.thread})"


class PtxError(Exception):
    """Base of all errors of the interpreter."""

    site: Site | None = None
    lane: int = 0
    """Which of the active lanes is at fault."""

    def at(self, site: Site) -> "PtxError":
        """The same error with its place; the innermost place wins."""
        if self.site is None:
            self.site = site
            self.args = (f"{self.args[0] if self.args else type(self).__name__}\n  at {site}",)
        return self


class PtxSyntaxError(PtxError):
    """The text is not PTX that the parser knows."""


class UnknownInstruction(PtxError):
    """The interpreter does not model this instruction or this modifier; it never guesses."""


class OutOfBounds(PtxError):
    """An access outside every allocation (or past the end of shared, local or parameter space)."""


class Misaligned(PtxError):
    """An address that is not a multiple of the access size."""


class UninitialisedRead(PtxError):
    """A read of bytes that nobody wrote (asked for per allocation)."""


class NonCoherentRead(PtxError):
    """`ld.global.nc` of bytes written during the launch: PTX allows it on read-only data alone."""


class MissingProxyFence(PtxError):
    """An asynchronous copy reads generic writes that no fence.proxy.async separates from it."""


class DataRace(PtxError):
    """Two conflicting accesses, at least one a write, that nothing orders and that are not both strong at a common
    scope.
    """


class WarpSyncError(PtxError):
    """A warp-level instruction used against its rules: a lane reads one that takes no part, a lane is not in its own
    mask.
    """


class BarrierError(PtxError):
    """Threads of one warp wait at different CTA barriers, or thread counts that can't be met."""


class Trap(PtxError):
    """The kernel executed `trap`."""


class Deadlock(PtxError):
    """No thread can make progress any more."""
