"""The rank's side of `tests.ranks`: run one function after another until the connection ends."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import traceback
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

import torch

from rose_dist.comm.world import World


def main(address: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    with World.join() as world:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        connection = Connection(link.detach())
        connection.send((world.rank, os.getpid()))
        while True:
            try:
                path, module, name, args = connection.recv()
            except EOFError:
                return
            sys.path[:] = path
            connection.send(call(world, module, name, args))


def call(world: World, module: str, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether the function returned, and its result or its traceback."""
    try:
        function = reduce(getattr, name.split("."), importlib.import_module(module))
        return True, function(world, *args)
    except BaseException:
        return False, traceback.format_exc()


if __name__ == "__main__":
    main(sys.argv[1])
