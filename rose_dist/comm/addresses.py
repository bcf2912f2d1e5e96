"""Addresses by which ranks reach each other outside MPI."""

from __future__ import annotations

import socket

from rose_dist.comm.world import World
from rose_dist.errors import RoseError


class AddressError(RoseError):
    """This host has no address that the others could reach."""


def reachable_address(world: World) -> str:
    """An IPv4 address of this host for the other ranks: the loopback one if all are on this host."""
    if len(set(world.hosts)) == 1:
        return "127.0.0.1"
    for family, *_, address in socket.getaddrinfo(world.host, None, socket.AF_INET):
        if family == socket.AF_INET and not str(address[0]).startswith("127."):
            return str(address[0])
    # The name leads to the loopback interface only, as Debian's /etc/hosts has it: ask which interface leads out.
    others = [host for host in world.hosts if host != world.host]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((others[0], 9))
        except OSError as error:
            raise AddressError(
                f"{world.host} has no address that {others[0]} could reach ({error}); give it one in DNS or /etc/hosts"
            ) from None
        return str(probe.getsockname()[0])
