"""Generation without a server: the first rank hands requests to its engine and reads the outputs itself."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from types import TracebackType

from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine, Outcome
from rose_dist.engine.protocol import Generate, Output


class OfflineSession:
    """Used on rank 0, a leader; the other ranks of its lockstep group are in `loop.serve`. Leaving the `with` block
    lets them end.
    """

    CLIENT = b"offline"

    def __init__(self, engine: Engine, bell: Doorbell) -> None:
        self.engine = engine
        self.bell = bell
        outcome, _ = engine.step()
        assert outcome is Outcome.IDLE  # the peers' first agreement

    def run(self, requests: Iterable[Generate]) -> Generator[Output, None, None]:
        """Outputs of all requests as they come, until all are finished. Closing the iterator cancels the rest."""
        for request in requests:
            yield from (output for _, output in self.engine.submit(self.CLIENT, request))
        yield from (output for _, output in self.engine.take_compiled(wait=True))
        if not self.engine.scheduler.has_work:
            return
        self.bell.ring()
        try:
            while self.engine.has_work:
                _, deliveries = self.engine.step()
                yield from (output for _, output in deliveries)
        finally:
            self.engine.cancel_all(self.CLIENT)
            while self.engine.step()[0] is Outcome.WORKED:  # until all go idle
                pass

    def __enter__(self) -> OfflineSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.bell.ring()
            self.engine.step(stop=True)
