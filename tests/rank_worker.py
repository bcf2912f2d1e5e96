"""The rank's side of `tests.ranks`: run one function after another until the connection ends."""

from __future__ import annotations

import faulthandler
import importlib
import os
import queue
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from functools import cache, reduce
from multiprocessing.connection import Connection, answer_challenge
from typing import Any, NoReturn

import torch

from rose_dist.comm.addresses import reachable_address
from rose_dist.comm.world import World
from tests.job import KEY


def main(port: int) -> None:
    """`port`: where rank 0's host listens; other ranks are told by rank 0."""
    torch.set_num_threads(1)
    with World.join() as world:
        mine = (reachable_address(world.hosts), port, bytes.fromhex(os.environ.get(KEY, "")))
        host, port, key = world.group.all_gather_objects(mine)[0]
        connection = Connection(socket.create_connection((host, port)).detach())
        answer_challenge(connection, key)
        connection.send(world.rank)
        for path, module, name, args, ranks in requests(connection):
            sys.path[:] = path
            connection.send(call(part(world, ranks), module, name, args))


def requests(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """What to run. A thread receives it, so that a rank that hangs can still be asked what it does."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                arrived.put(None)
                return
            if message == "stack":
                connection.send(("stack", stack()))
            elif message == "abort":
                abort()
            else:
                arrived.put(message)

    threading.Thread(target=receive, daemon=True).start()
    while (request := arrived.get()) is not None:
        yield request


def abort() -> NoReturn:
    """End the job, as a rank hangs. A signal to rank 0's stand-in would end it too, but mpirun, which sees that rank go
    twice then, hung in 2 of 12 runs.
    """
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def stack() -> str:
    """What every thread of this rank does."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


@cache
def part(world: World, ranks: int) -> World:
    """The world that the first `ranks` ranks make; collective over them."""
    if ranks == world.size:
        return world
    from mpi4py import MPI  # noqa: PLC0415

    everybody = MPI.COMM_WORLD
    part = World(everybody.Create_group(everybody.group.Incl(range(ranks))), None, 60)
    part.hosts = world.hosts[:ranks]
    return part


def call(world: World, module: str, name: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    """`result` and what the function returned, or `failure` and its traceback."""
    try:
        function = reduce(getattr, name.split("."), importlib.import_module(module))
        return "result", function(world, *args)
    except BaseException:
        return "failure", traceback.format_exc()


if __name__ == "__main__":
    main(int(sys.argv[1]))
