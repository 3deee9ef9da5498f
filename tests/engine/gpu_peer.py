"""Another process with GPU memory: `python -m tests.engine.gpu_peer NAME FABRIC`, started by
verify/processes/worker.py."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from kvxfer import Engine
from kvxfer.errors import PeerLost
from tests.cuda import device_memory
from tests.cuda.bindings import context
from tests.engine.conftest import new_engine
from verify.polling import PATIENCE
from verify.processes.commands import commands, report

NBYTES: Final = 4 << 20
_OFFSET: Final = 3 << 12  # where the region begins in its allocation


async def serve(engine: Engine) -> None:
    memory = engine.alloc(_OFFSET + NBYTES, gpu=0)
    region = engine.register(memory.region.address + _OFFSET, NBYTES)
    report("ready", address=engine.address)
    async for command in commands():
        match command["do"]:
            case "describe":
                report(id=command["id"], descriptor=region.descriptor.hex())
            case "fill":
                device_memory.write(region.address, bytes([command["with"]]) * NBYTES)
                report(id=command["id"])
            case "corrupt":
                device_memory.corrupt_peers()
                report(id=command["id"])
            case "read":
                found = device_memory.read(region.address, NBYTES)
                report(id=command["id"], data=found.hex())
            case "write":  # without an end if `times` is 0
                peer = await engine.connect(command["address"], PATIENCE)
                target, imm = bytes.fromhex(command["descriptor"]), command["imm"]
                written = 0
                try:
                    while not command["times"] or written < command["times"]:
                        await peer.write(region, target, length=NBYTES, imm=imm)
                        written += 1
                except PeerLost:
                    report("lost")
                report(id=command["id"])


async def main(name: str, fabric: str) -> None:
    async with new_engine(fabric, name) as engine:
        await serve(engine)


if __name__ == "__main__":
    context()
    asyncio.run(main(*sys.argv[1:]))
