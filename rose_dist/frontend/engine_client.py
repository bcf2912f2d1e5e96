"""The engine as this frontend sees it: replicas that come and go, their leaders, and the requests on their way."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from rose_dist.engine.protocol import Cancel, Generate, Outputs, Ready, ToFrontend
from rose_dist.frontend.announcements import Announcements
from rose_dist.frontend.errors import ReplicaLostError
from rose_dist.frontend.generation import Generation
from rose_dist.frontend.leader import Leader
from rose_dist.frontend.routing import Router

logger = logging.getLogger(__name__)


LOADING = "it is loading the model"


@dataclass
class Replica:
    """A job of ranks that can be lost without the others: one or more leaders."""

    number: int
    leaders: list[Leader] = field(default_factory=list)
    """By data-parallel rank; empty while there is no such job."""
    gone: str = LOADING
    """Why it is not ready."""

    @property
    def ready(self) -> bool:
        return bool(self.leaders) and all(leader.ready is not None for leader in self.leaders)


class EngineClient:
    def __init__(self, addresses: Sequence[str], replicas: int = 0) -> None:
        """
        Args:
            addresses: ZMQ addresses of the leaders' ROUTER sockets, by data-parallel rank, if there is but one job,
                with which this process ends.
            replicas: otherwise how many jobs there are; `attach` and `detach` tell of each.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._addresses = addresses
        self._detachable = replicas > 0
        self.replicas = [Replica(number) for number in range(replicas or 1)]
        self._router = Router()
        self._generations: dict[str, tuple[Generation, Leader]] = {}
        self._announcements = Announcements()

    def open(self) -> None:
        """Greet the leaders of the one job. Call on the running loop."""
        if not self._detachable:
            self.attach(0, self._addresses)

    def attach(self, number: int, addresses: Sequence[str]) -> None:
        """A replica, perhaps a new one in a lost one's place, has loaded the model."""
        replica = self.replicas[number]
        self._close(replica)
        lose = self._lose if self._detachable else None
        replica.leaders = [Leader(self._context, address, self._take, lose) for address in addresses]

    def detach(self, number: int, reason: str) -> None:
        """A replica has ended: its requests raise `ReplicaLostError`."""
        replica = self.replicas[number]
        self._close(replica)
        replica.gone = reason

    def _close(self, replica: Replica) -> None:
        leaders, replica.leaders = replica.leaders, []
        for leader in leaders:
            leader.ready = None
            leader.close()
            self._give_up(leader)

    def close(self, *, shutdown: bool = False) -> None:
        """Leave the loop; with `shutdown`, tell every leader to end."""
        for replica in self.replicas:
            for leader in replica.leaders:
                leader.close(shutdown=shutdown)
        self._context.term()

    @property
    def ready(self) -> bool:
        """Some replica takes requests."""
        return any(replica.ready for replica in self.replicas)

    def why_not_ready(self) -> str:
        """For clients."""
        lost = any(replica.gone != LOADING for replica in self.replicas)
        return "No replica is up; they are being started again" if lost else "The model is still loading"

    def missing(self) -> list[Replica]:
        """The replicas that are not ready."""
        return [replica for replica in self.replicas if not replica.ready]

    def numbered(self) -> Iterator[tuple[int, Replica, Leader]]:
        """The leaders that there are, each with a number that stays the same when others are lost."""
        most = max(len(replica.leaders) for replica in self.replicas)  # all ready ones have as many
        for replica in self.replicas:
            for rank, leader in enumerate(replica.leaders):
                yield replica.number * most + rank, replica, leader

    @property
    def max_prompt_room(self) -> tuple[int, int]:
        """(max_context, kv_capacity) in tokens: what the smallest leader takes for prompt plus output.

        Raises:
            ReplicaLostError: no replica is ready any more.
        """
        ready = [leader.ready for _, _, leader in self.numbered() if leader.ready is not None]
        if not ready:
            raise ReplicaLostError
        return min(r.max_context for r in ready), min(r.kv_capacity for r in ready)

    def start(self, requests: list[Generate]) -> Generation:
        """Send the choices of one request, all to one leader, so that they share their prompt's cache.

        Raises:
            ReplicaLostError: no replica is ready any more.
        """
        leaders = {number: leader for number, replica, leader in self.numbered() if replica.ready}
        if not leaders:
            raise ReplicaLostError
        loads = {number: leader.in_flight for number, leader in leaders.items()}
        leader = leaders[self._router.choose(requests[0].prompt, loads)]
        generation = Generation([request.request_id for request in requests], self._cancel, self._announcements)
        for request in requests:
            self._generations[request.request_id] = (generation, leader)
            leader.in_flight += 1
            leader.send(request)
        return generation

    def abort_all(self, error: Exception) -> None:
        for generation in {generation for generation, _ in self._generations.values()}:
            generation.abort(error)

    def _cancel(self, request_id: str) -> None:
        leader = self._forget(request_id)
        if leader is not None:
            leader.send(Cancel(request_id))

    def _forget(self, request_id: str) -> Leader | None:
        entry = self._generations.pop(request_id, None)
        if entry is None:
            return None
        entry[1].in_flight -= 1
        return entry[1]

    def _lose(self, leader: Leader) -> None:
        for replica in self.replicas:
            if leader in replica.leaders:
                replica.gone = "it can't be reached"
                logger.warning("Replica %d can't be reached at %s", replica.number, leader.address)
        self._give_up(leader)

    def _give_up(self, leader: Leader) -> None:
        """End the requests that it works on, without telling it."""
        lost = {request_id: generation for request_id, (generation, at) in self._generations.items() if at is leader}
        for request_id in lost:
            self._forget(request_id)
        for generation in set(lost.values()):
            generation.abort(ReplicaLostError())

    def _take(self, leader: Leader, message: ToFrontend) -> None:
        if isinstance(message, Ready):
            leader.ready = message
            logger.info("Leader %d of %d is ready: %s", message.dp_rank, message.dp_size, message.layout)
            return
        self._hand_out(leader, message)

    def _hand_out(self, leader: Leader, message: Outputs) -> None:
        leader.stats = message.stats
        generations = self._generations
        for output in message.outputs:
            entry = generations.get(output.request_id)
            if entry is None:
                continue
            if output.finish is not None:
                self._forget(output.request_id)
            entry[0].deliver(output)
