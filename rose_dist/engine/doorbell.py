"""Sleeping while there is nothing to do, and waking together.

An idle rank waits on sockets, not in a collective, so that it costs no CPU time. The leader that gets work rings the
bell of every rank it steps with; all then meet in `Engine.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from rose_dist.comm.group import Group

CHECK_MILLISECONDS = 500
"""How often an idle rank looks after other things, such as a child that died."""


class Descriptor(Protocol):
    """A file descriptor that can be waited for."""

    def fileno(self) -> int: ...


class Doorbell:
    """One rank's bell, and the bells of its peers.

    A ring carries the number of the idle period that it ends. All ranks of the group count these alike, since they go
    idle by agreement; a ring that comes late, after another leader's ended the period, is so told from a new one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, group: Group) -> None:
        """Collective over `group`. `host` is an address of this rank that the others can reach."""
        self._period = 0
        self._bell = context.socket(zmq.PULL)
        port = self._bell.bind_to_random_port(f"tcp://{host}")
        self._peers: list[zmq.Socket[bytes]] = []
        for rank, address in enumerate(group.all_gather_objects(f"tcp://{host}:{port}")):
            if rank != group.rank:
                peer = context.socket(zmq.PUSH)
                peer.linger = 0
                peer.connect(address)
                self._peers.append(peer)

    def ring(self) -> None:
        """Wake the peers: this rank leaves the idle period too."""
        for peer in self._peers:
            peer.send(self._period.to_bytes(8, "little"))
        self._period += 1

    def wait(
        self,
        inboxes: Sequence[zmq.Socket[bytes] | Descriptor],
        on_message: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        """Return when a peer rings, or when something came into `inboxes` of which `on_message` says that it is work;
        then ring. `check` is called now and then.
        """
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        for inbox in inboxes:
            poller.register(inbox, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(CHECK_MILLISECONDS))
            check()
            if ready.keys() - {self._bell} and on_message():
                self.ring()
                return
            if self._bell in ready and int.from_bytes(self._bell.recv(), "little") == self._period:
                self._period += 1
                return
