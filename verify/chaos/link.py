"""Two network namespaces of this host, and a cable between them that can be damaged."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from kvxfer.errors import KvxferError

Damage: TypeAlias = Literal["cut", "reset", "loss", "port down"]

# The rule of each namespace for incoming packets. RST packets pass, so that both ends see one.
_RULES: Final = {
    "cut": "drop",
    "reset": "tcp flags & rst == 0 reject with tcp reset",
    "loss": "numgen random mod 100 < 5 drop",
}
_NETWORK: Final = 0x40000000
"""CLONE_NEWNET."""
_SMALLEST_BUFFER: Final = 4096
_REACH_SECONDS: Final = 20.0
_numbers: Final = itertools.count(os.getpid() % 4096)


class CommandFailed(KvxferError):
    """A system command failed."""


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the cable."""

    namespace: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line that runs a command in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def enter(self) -> None:
        """Moves this thread into the namespace, with the threads that it starts later. Raises
        OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.namespace).open() as there:
            if libc.setns(there.fileno(), _NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


class Link:
    """The cable between two hosts, made by link(). Loop only."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.hosts = hosts

    async def damage(self, how: Damage) -> float:
        """Damages the link until mend(): no packet passes, every connection is reset, 5 % of the
        packets are lost, or one port has no carrier. Returns `time.monotonic()` just before."""
        if how == "port down":
            host = self.hosts[0]
            return await _run_at(host, f"ip link set {host.interface} down")
        chain = f"type filter hook input priority 0; {_RULES[how]};"
        rules = f"nft 'table inet cable {{ chain in {{ {chain} }}; }}'"
        return min(await asyncio.gather(*(_run_at(host, rules) for host in self.hosts)))

    async def mend(self) -> None:
        for host in self.hosts:
            await run_command(*host.command("nft", "flush", "ruleset"))
            await run_command(*host.command("ip", "link", "set", host.interface, "up"))
        here, there = self.hosts
        await asyncio.gather(_reach(here, there.address), _reach(there, here.address))


async def _run_at(host: Host, command: str) -> float:
    """Runs a command in a host's namespace. Returns the time when it began: on a busy machine the
    shell starts late, and nothing is broken before the command begins."""
    clock = time.time() - time.monotonic()
    told = await run_command(*host.command("bash", "-c", f"echo $EPOCHREALTIME; exec {command}"))
    return float(told) - clock


async def _reach(host: Host, address: str) -> None:
    """Waits until packets arrive, that is, until the other side refuses a connection. This takes
    longer after a port was down. Raises CommandFailed after _REACH_SECONDS."""
    until = time.monotonic() + _REACH_SECONDS
    while True:
        try:
            await run_command(
                *host.command("timeout", "1", "bash", "-c", f": > /dev/tcp/{address}/1")
            )
        except CommandFailed as failed:
            if "refused" in str(failed):
                return
            if time.monotonic() > until:
                raise
        await asyncio.sleep(0.01)


def why_no_links() -> str | None:
    """Returns why this host cannot have links; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (package {package}); remedy: scripts/setup test"
    return None


@contextlib.asynccontextmanager
async def link(*, small_buffers: bool = False) -> AsyncIterator[Link]:
    """Makes two hosts and their link; removes them at the end. With `small_buffers` their sockets
    have buffers of 4 KiB each way. Raises CommandFailed."""
    number = next(_numbers)
    names = (f"kvx{number}p", f"kvx{number}d")
    subnet = f"10.{200 + number // 256 % 50}.{number % 256}"
    hosts = (Host(names[0], f"{subnet}.1", names[0]), Host(names[1], f"{subnet}.2", names[1]))
    try:
        for host in hosts:
            await run_command("ip", "netns", "add", host.namespace)
        cable = ["link", "add", names[0], "netns", names[0], "type", "veth"]
        await run_command("ip", *cable, "peer", "name", names[1], "netns", names[1])
        for host in hosts:
            inside = ["ip", "-n", host.namespace]
            await run_command(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            await run_command(*inside, "link", "set", "lo", "up")
            await run_command(*inside, "link", "set", host.interface, "up")
            if small_buffers:
                sizes = " ".join([str(_SMALLEST_BUFFER)] * 3)
                for name in ("tcp_rmem", "tcp_wmem"):
                    await run_command(*host.command("sysctl", "-qw", f"net.ipv4.{name}={sizes}"))
        yield Link(hosts)
    finally:
        for host in hosts:
            with contextlib.suppress(CommandFailed):
                await run_command("ip", "netns", "del", host.namespace)


async def run_command(*command: str, given: str = "") -> str:
    """Runs a command with the input `given`. Returns its output. Raises CommandFailed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaint = await process.communicate(given.encode())
    if process.returncode:
        raise CommandFailed(f"{' '.join(command)}: {complaint.decode().strip()}")
    return printed.decode()
