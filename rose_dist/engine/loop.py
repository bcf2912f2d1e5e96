"""The step loop of a serving rank."""

from __future__ import annotations

from collections.abc import Callable

from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine, Outcome
from rose_dist.engine.mailbox import Mailbox


def serve(engine: Engine, bell: Doorbell, mailbox: Mailbox | None, check: Callable[[], None]) -> None:
    """Step until every leader of the lockstep group was told to stop and has nothing left to do.

    Args:
        mailbox: where a leader's requests come from; None on ranks that are given none.
        check: called at least twice a second; an exception of its ends the loop.
    """

    def wake() -> bool:
        if mailbox is None:
            return False
        work = mailbox.receive(engine)
        engine.scheduler.update_gauges()
        mailbox.deliver([], engine.scheduler.stats)
        return work

    if mailbox is not None:
        engine.compiles.prepare()
    while True:
        if mailbox is not None:
            mailbox.receive(engine)
        check()
        outcome, deliveries = engine.step(stop=mailbox is None or mailbox.stopping)
        if mailbox is not None:
            mailbox.deliver(deliveries, engine.scheduler.stats)
        if outcome is Outcome.STOPPED:
            return
        if outcome is Outcome.IDLE:
            bell.wait([] if mailbox is None else [mailbox.socket, engine.compiles], wake, check)
