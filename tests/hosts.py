"""Several hosts on one machine, out of Linux namespaces: each has its own name, address, processes, /dev/shm.

All hosts hang on one bridge, and so does this machine. They share its file system, but for the folder that mpirun's
daemons keep their sessions in: it is named by process id, of which each host has its own. A host ends when its first
process does, and with it everything that runs there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

_LIFE = "while :; do sleep 3600; done"
"""What a host's first process does: a shell in `wait` collects orphans that ended."""


def skip_unless_root() -> None:
    """Skips the test where namespaces can't be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root for network namespaces")
    for tool in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: apt-get install iproute2 util-linux)")


@dataclass
class Host:
    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    first_process: int
    """The process id, as this machine counts, of what is process 1 there."""
    link: str
    """This machine's end of its network cable."""

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host, in this process' working directory."""
        here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]
        return [
            "nsenter", "--target", str(self.first_process), "--net", "--uts", "--mount", "--ipc", "--pid", "--", *here
        ]  # fmt: skip

    def run(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.enter(*command), check=check, capture_output=True, text=True, **options)

    def processes(self) -> dict[int, str]:
        """What runs there besides the first process and its sleep: command lines by process id of this machine."""
        namespace = Path(f"/proc/{self.first_process}/ns/pid").readlink()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if (folder / "ns/pid").readlink() == namespace and command and command != "sleep 3600":
                    found[int(folder.name)] = command
        found.pop(self.first_process, None)
        return found

    def shared_memory(self) -> list[str]:
        return os.listdir(f"/proc/{self.first_process}/root/dev/shm")

    def set_link(self, state: str) -> None:
        """`up` or `down`: plug the network cable in, or pull it."""
        _ip("link", "set", self.link, state)

    def crash(self) -> None:
        """The power fails."""
        os.kill(self.first_process, signal.SIGKILL)


class Hosts(Sequence[Host]):
    """`count` hosts until the block is left."""

    def __init__(self, count: int, folder: Path) -> None:
        """`folder`: for their /etc/hosts and the launch agent."""
        self._count = count
        self._folder = folder
        self._hosts: list[Host] = []

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        _remove_abandoned()
        self.number = _free_network()
        self.network = f"10.77.{self.number}.0/24"
        self.bridge = f"rose{self.number}"
        _ip("link", "add", self.bridge, "alias", str(os.getpid()), "type", "bridge")
        try:
            _ip("addr", "add", f"10.77.{self.number}.254/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
            names = [f"n{self.number}-{index}" for index in range(1, self._count + 1)]
            lines = [f"10.77.{self.number}.{index} {name}" for index, name in enumerate(names, 1)]
            (self._folder / "sessions").mkdir()
            (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            for index, name in enumerate(names, 1):
                self._hosts.append(self._start(index, name))
            self.agent = self._write_agent()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self, index: int, name: str) -> Host:
        setup = [
            f"hostname {name}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount -t tmpfs tmpfs {shlex.quote(str(self._folder / 'sessions'))}",
            f"mount --bind {shlex.quote(str(self._folder / 'hosts'))} /etc/hosts",
            "echo ready",
        ]
        keeper = subprocess.Popen(
            [
                "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork",
                "--kill-child", "--mount-proc", "--", "sh", "-ec", "; ".join([*setup, _LIFE]),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        first = int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0])
        address, link = f"10.77.{self.number}.{index}", f"{self.bridge}n{index}"
        host = Host(name, address, keeper, first, link)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _ip("link", "set", link, "master", self.bridge, "up")
        host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            host.run("ip", "link", "set", interface, "up")
        host.run("ip", "route", "add", "default", "via", f"10.77.{self.number}.254")
        return host

    def _write_agent(self) -> Path:
        """What mpirun runs in ssh's place: `agent HOST COMMAND`."""
        agent = self._folder / "agent"
        shell = ["env", f"PRTE_MCA_prte_remote_tmpdir_base={self._folder / 'sessions'}", "sh", "-c"]
        cases = "\n".join(
            f'  {host.name}|{host.address}) exec {shlex.join(host.enter(*shell))} "$*";;' for host in self
        )
        agent.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}\nesac\necho "no host $host" >&2\nexit 1\n')
        agent.chmod(0o755)
        return agent

    def stop(self) -> None:
        for host in self._hosts:
            host.keeper.kill()
        for host in self._hosts:
            host.keeper.wait()
            assert host.keeper.stdout is not None
            host.keeper.stdout.close()
            with contextlib.suppress(subprocess.CalledProcessError):  # the kernel was faster
                _ip("link", "del", host.link)
        _ip("link", "del", self.bridge)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _free_network() -> int:
    taken = {int(number) for number in re.findall(r"inet 10\.77\.(\d+)\.", _ip("-o", "-4", "addr"))}
    return min(set(range(1, 255)) - taken)


def _remove_abandoned() -> None:
    """Bridges of test runs that were killed."""
    for folder in Path("/sys/class/net").glob("rose*"):
        owner = (folder / "ifalias").read_text().strip() if (folder / "bridge").exists() else ""
        if owner and not Path("/proc", owner).exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", folder.name)
