"""Addresses by which ranks reach each other outside MPI, and clients the API."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from rose_dist.errors import RoseError


class AddressError(RoseError):
    """This host has no address that the others could reach."""


def reachable_address(hosts: Sequence[str]) -> str:
    """An IPv4 address of this host for the others of `hosts`: the loopback one if there is none.

    Raises:
        AddressError: there is none.
    """
    others = [host for host in hosts if host != socket.gethostname()]
    return outward_address(others[0]) if others else "127.0.0.1"


def outward_address(other: str = "192.0.2.1") -> str:
    """The IPv4 address of this host that DNS or /etc/hosts know; failing that, the one of the interface that leads to
    `other`, a host. The default is in a network that nobody has (RFC 5737): the default route leads there.

    Raises:
        AddressError: there is none.
    """
    name = socket.gethostname()
    try:
        known = socket.gethostbyname_ex(name)[2]
    except socket.gaierror:
        known = []
    for address in known:
        if not address.startswith("127."):  # Debian's /etc/hosts leads a host's own name to the loopback interface
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # sends nothing
        except OSError as error:
            raise AddressError(
                f"{name} has no address that {other} could reach ({error}); give it one in DNS or /etc/hosts"
            ) from None
        return str(probe.getsockname()[0])
