"""An inference rank of the benchmark."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.weights.model import (
    Parameter,
    content,
    held_by,
    pieces,
    wanted_by,
)
from benchmarks.weights.rank import (
    RECEIVERS,
    SECONDS,
    SENDERS,
    Rank,
    WrongBytes,
    all_say,
    as_bytes,
    tag_of,
)
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.staged import Staged


class Receiver(Rank):
    """An instance of one rank, which wants a part of each parameter."""

    def __init__(self, rank: int, model: list[Parameter], key: str) -> None:
        super().__init__(rank, model, key)
        self._number = rank - SENDERS
        self._wanted = wanted_by(model, self._number, RECEIVERS)
        self._served = {
            each.name: torch.empty(each.shape, dtype=torch.bfloat16)
            for each in self._wanted.parameters
        }
        """The memory that gloo writes to."""
        self._pieces = [
            list(pieces(held_by(model, sender, SENDERS), self._wanted)) for sender in range(SENDERS)
        ]

    def blank(self, way: str) -> None:
        if way in ("update", "raw"):
            memory = self._receiver.memory if way == "update" else self._raw_memory
            torch.frombuffer(memory, dtype=torch.uint8).zero_()
        else:
            for each in self._served.values():
                each.zero_()

    def check(self, way: str) -> None:
        found = self._served
        if way == "raw":
            # The bytes are not those of an update, but as many: no block stays blank.
            memory = np.frombuffer(self._raw_memory, np.uint64)
            if not np.add.reduceat(memory, np.arange(0, len(memory), 1 << 12)).all():
                raise WrongBytes("a raw write has left a part of the memory blank")
            return
        if way == "update":
            memory = torch.frombuffer(self._receiver.memory, dtype=torch.uint8)
            found = {
                name: memory[place.offset : place.offset + place.nbytes]
                .view(torch.bfloat16)
                .view(place.holding.shape)
                for name, place in self._receiver.arena.places.items()
            }
        for number, holding in enumerate(self._wanted.parameters):
            box = content(holding, number)
            if not torch.equal(found[holding.name].view(torch.int16), box.view(torch.int16)):
                raise WrongBytes(f"{holding.name} is not as it was sent by {way!r}")

    def _connect(self) -> None:
        coordinator = all_say(None)[0]
        said = self._loop.run(self._join(coordinator), SECONDS)
        all_say(said)

    async def _join(self, coordinator: str) -> tuple[str, bytes]:
        """Joins the coordinator. Returns the address for raw writes, and where they go."""
        self._receiver = await self._loop.stack.enter_async_context(
            WeightReceiver(
                await self._engine("update"),
                self._wanted,
                instance_id=f"instance {self._number}",
                commit=_commit,
            )
        )
        raw = await self._engine("raw")
        nbytes = sum(each.nbytes for parts in self._pieces for each in parts)
        self._raw_memory = raw.alloc(nbytes)
        await self._receiver.join(coordinator)
        return raw.address, self._raw_memory.region.descriptor

    def _disconnect(self) -> None:
        """Does nothing: all ends with the loop."""

    def _update(self) -> None:
        """Does nothing: the receiver takes updates on its loop."""

    def _raw(self) -> None:
        """Does nothing: the engine takes the writes."""

    def _gather(self) -> None:
        for each, holding in zip(self._model, self._wanted.parameters, strict=True):
            whole = self._whole[: torch.Size(each.shape).numel()]
            dist.broadcast(as_bytes(whole), 0, group=self._broadcast)
            box = tuple(
                slice(at, at + size) for at, size in zip(holding.offset, holding.shape, strict=True)
            )
            self._served[each.name].copy_(whole.view(each.shape)[box])

    def _send(self) -> None:
        numbers = {each.name: number for number, each in enumerate(self._model)}
        received = []
        for sender, parts in enumerate(self._pieces):
            for each in parts:
                place = self._served[each.name][each.wanted]
                box = place if place.is_contiguous() else torch.empty_like(place.contiguous())
                tag = tag_of(numbers[each.name], sender, self._number)
                received.append((box, place, dist.irecv(as_bytes(box), sender, tag=tag)))
        for box, place, work in received:
            work.wait()
            if box is not place:
                place.copy_(box)


async def _commit(_: Staged) -> None:
    """Applies nothing: the work of inference engines is not measured here."""
