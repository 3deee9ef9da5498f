"""One member of a training job or of an instance: a process that breaks itself on command.

Run as `python -m verify.chaos.weights.member NAME CONTROL-SOCKET OPTIONS-AS-JSON`. It takes
commands and answers them over the socket, one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine import Engine
from kvxfer.errors import KvxferError
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.links import Links
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.settings import UpdateSettings
from kvxfer.weights.transfer.staged import Staged
from verify.polling import eventually

from .content import ARENA_BYTES, TRAINERS, Array, boxes, held, wanted, whole
from .defects import DEFECTS

KEY = "chaos of weight updates, 32 bytes"
_FOLLOWER_SECONDS = 3.0


class Breakage:
    """A fault that breaks this process once, at a message."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._at: tuple[str, str, int] | None = None

    def arm(self, on: str, kind: str, act: str, count: int) -> None:
        self._at = (on, kind, count)
        self._act = act

    def pass_by(self, on: str, kind: str) -> None:
        if self._at is None or self._at[:2] != (on, kind):
            return
        if self._at[2] > 1:
            self._at = (on, kind, self._at[2] - 1)
            return
        self._at = None
        self._tell({"broken_at": SYSTEM_CLOCK.monotonic()})
        # The signal goes to this thread: if another thread took it, this thread would run on until
        # that one gets a core.
        number = signal.SIGKILL if self._act == "kill" else signal.SIGSTOP
        signal.pthread_kill(threading.get_ident(), number)

    def watch(self, links: Links) -> None:
        """Calls pass_by() for all messages of a member."""
        send, take = links.send, links._on_message

        def sent(peer: Any, message: Any) -> bool:
            kind = type(message).__name__
            self.pass_by("send", kind)
            is_there = send(peer, message)
            if self._at is not None and self._at[:2] == ("send", kind):
                # A fault at a later message must come after this one is sent: the engine's thread
                # frees memory only after its earlier work.
                links.engine.alloc(1).close()
            return is_there

        def taken(peer: Any, message: Any) -> None:
            self.pass_by("receive", type(message).__name__)
            take(peer, message)

        links.send = sent  # type: ignore[method-assign]
        links._on_message = taken


class TrainingRank:
    """A training rank with the blocking interface, as a training loop uses it."""

    def __init__(self, rank: int, options: dict[str, Any], breakage: Breakage) -> None:
        self._version = 0
        self._tensors: dict[str, Array] = {}
        self._trainer = Trainer(
            held(rank),
            lambda: self._tensors,
            rank=rank,
            world_size=TRAINERS,
            cluster_key=KEY,
            coordinator=options.get("coordinator"),
            receivers=options.get("receivers", ()),
            settings=UpdateSettings(
                mode=options["mode"],
                ready_seconds=8,
                plan_seconds=8,
                stage_seconds=8,
                commit_seconds=8,
            ),
            fabrics=[options["fabric"]],
        )
        self._rank = rank
        thread = self._trainer._thread
        breakage.watch(thread._sender._links)
        if thread._leader is not None:
            breakage.watch(thread._leader._links)

    def say(self) -> dict[str, Any]:
        return {"coordinator": self._trainer.coordinator}

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "wait":
            await asyncio.to_thread(self._trainer.wait_for, command["instances"], 30)
            return {}
        if command["do"] == "rejoin":
            thread = self._trainer._thread
            coordinator = thread._sender._coordinator
            if coordinator is not None:
                coordinator.close()
                await eventually(lambda: thread._sender._coordinator not in (None, coordinator))
            return {}
        return await asyncio.to_thread(self._push, command["version"])

    def _push(self, version: int) -> dict[str, Any]:
        # Written in place, as by an optimiser, so that no memory is registered again.
        for name, box in boxes(held(self._rank), whole(version)).items():
            self._tensors.setdefault(name, np.empty_like(box))[...] = box
        push = self._trainer.push(version)
        try:
            push.read()
            report = push.result()
        except KvxferError as error:
            push.read()
            return {"ended": error.code, "text": str(error), "at": SYSTEM_CLOCK.monotonic()}
        return {
            "ended": report.state,
            "instances": {each.instance_id: each.state for each in report.instances},
            "at": SYSTEM_CLOCK.monotonic(),
        }

    async def close(self) -> None:
        await asyncio.to_thread(self._trainer.close)


class InferenceRank:
    """An inference rank. It serves weights that it has copied out of its arena. The leader makes
    its follower copy, too."""

    def __init__(self, instance: str, rank: int, options: dict[str, Any], breakage: Breakage):
        self._holdings = wanted(instance, rank)
        self._place = (instance, rank)
        self._options = options
        self._breakage = breakage
        self._serves = boxes(self._holdings, whole(options["version"]))

    async def start(self) -> None:
        instance, rank = self._place
        self._engine = Engine(
            cluster_key=KEY,
            fabrics=[self._options["fabric"]],
            name=f"{instance}-{rank}",
            port=self._options["port"],
        )
        await self._engine.__aenter__()
        self._receiver = WeightReceiver(
            self._engine,
            self._holdings,
            instance_id=instance,
            rank=rank,
            ranks=self._options["ranks"],
            commit=self._commit if rank == 0 else None,
            version=self._options["version"],
            # Smaller than the model of 2.3 MB.
            arena_bytes=ARENA_BYTES if self._options["mode"] == "wave" else None,
        )
        self._breakage.watch(self._receiver._links)
        if rank:
            await asyncio.start_unix_server(self._follow, self._options["follower"])

    def say(self) -> dict[str, Any]:
        return {}

    async def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        receiver = self._receiver
        wants = boxes(self._holdings, whole(receiver.version))
        wrong = [name for name in wants if not np.array_equal(wants[name], self._serves[name])]
        return {
            "version": receiver.version,
            "wrong": wrong,
            "idle": receiver.idle,
            "digest": receiver.digest,
            "error": None if receiver.error is None else str(receiver.error),
            "partial": receiver.partial,
        }

    def _copy(self) -> None:
        self._breakage.pass_by("apply", "none")
        memory = np.frombuffer(memoryview(self._receiver.memory), np.uint8)
        places = self._receiver.arena.places
        for number, (name, place) in enumerate(places.items()):
            if number == len(places) // 2:
                self._breakage.pass_by("apply", "half")
            part = memory[place.offset : place.offset + place.nbytes].view(np.float32)
            self._serves[name][...] = part.reshape(place.holding.shape)
        self._breakage.pass_by("apply", "all")

    async def _commit(self, staged: Staged) -> float | None:
        began = SYSTEM_CLOCK.monotonic()
        if self._options["ranks"] > 1:
            async with asyncio.timeout(_FOLLOWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._options["follower"])
                for do in ("pin", "apply"):
                    writer.write(json.dumps({do: staged.update_id}).encode() + b"\n")
                    answer = json.loads(await reader.readline())
                    if answer is not True:
                        raise RuntimeError(f"the follower does not {do}: {answer}")
                writer.close()
        self._copy()
        return SYSTEM_CLOCK.monotonic() - began

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pinned: Staged | None = None
        while line := await reader.readline():
            command = json.loads(line)
            answer: Any = True
            try:
                if "pin" in command:
                    pinned = self._receiver.pin(command["pin"])
                elif pinned is not None:
                    self._copy()
                    self._receiver.applied(pinned)
            except KvxferError as error:
                answer = str(error)
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def close(self) -> None:
        await self._receiver.__aexit__()
        await self._engine.close()


async def main(name: str, control: str, options: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_unix_connection(control)

    def tell(answer: dict[str, Any]) -> None:
        # Without a buffer: the process may be about to end.
        os.write(writer.get_extra_info("socket").fileno(), json.dumps(answer).encode() + b"\n")

    if options["defect"]:
        DEFECTS[options["defect"]][0]()
    kind, rank = name.rsplit("-", 1)
    breakage = Breakage(tell)
    member: TrainingRank | InferenceRank
    if kind == "trainer":
        member = await asyncio.to_thread(TrainingRank, int(rank), options, breakage)
    else:
        member = InferenceRank(kind, int(rank), options, breakage)
        await member.start()
    tell({"name": name, **member.say()})
    async for command in _lines(reader):
        if command["do"] == "break":
            breakage.arm(command["on"], command["kind"], command["act"], command["count"])
            tell({"id": command["id"]})
        else:
            asyncio.ensure_future(_answer(member, command, tell))  # noqa: RUF006 (it tells)
    await member.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    while line := await reader.readline():
        yield json.loads(line)


async def _answer(
    member: TrainingRank | InferenceRank,
    command: dict[str, Any],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    try:
        answer = await member.handle(command)
    except KvxferError as error:
        answer = {"ended": error.code, "text": str(error), "at": SYSTEM_CLOCK.monotonic()}
    tell({"id": command["id"], **answer})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(main(sys.argv[1], str(Path(sys.argv[2])), json.loads(sys.argv[3])))
