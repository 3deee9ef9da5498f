"""The ports of an emulated machine's RDMA devices, which can go down."""

from __future__ import annotations

import asyncio
import fcntl
import platform
import socket
import struct
import time
from pathlib import Path
from typing import Final

from verify.chaos.link import Damage, run_command

_INTERFACE: Final = Path(__file__).parents[3] / "scripts/rxe/guest-interface"
_DEVICES: Final = Path("/sys/class/infiniband")
# From <linux/sockios.h>: sets an interface's flags.
_SIOCSIFFLAGS: Final = 0x8914
# The name that scripts/rxe-machine gives its machine. Links of other machines are not touched.
_MACHINE: Final = "rxe-machine"


class RdmaPorts:
    """The ports of all RDMA devices. Loop only."""

    async def damage(self, how: Damage) -> float:
        """Takes all links down until mend(). Returns `time.monotonic()` just before."""
        assert how == "port down"
        at = time.monotonic()
        # A command would start too slowly on an emulated machine.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for number in range(_count()):
                interface = f"rx{number}".encode()
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", interface, 0))
        return at

    async def mend(self) -> None:
        # The routes were lost with the links.
        for number in range(_count()):
            again = await run_command(str(_INTERFACE), str(number), str(_count()))
            await run_command("ip", "-batch", "-", given=again)
        await asyncio.gather(*(_is_active(device) for device in _DEVICES.iterdir()))


def on_an_emulated_machine() -> bool:
    return platform.node() == _MACHINE


def _count() -> int:
    return len(list(_DEVICES.iterdir()))


async def _is_active(device: Path) -> None:
    async with asyncio.timeout(20):
        # sysfs sends no event.
        while "ACTIVE" not in (device / "ports/1/state").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
