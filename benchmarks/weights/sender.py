"""A training rank of the benchmark."""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist

from benchmarks.weights.model import Parameter, content, held_by, pieces, wanted_by
from benchmarks.weights.rank import (
    RECEIVERS,
    SECONDS,
    SENDERS,
    Rank,
    all_say,
    as_bytes,
    tag_of,
)
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.engine import MemoryRegion, Peer
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.settings import UpdateSettings


class Sender(Rank):
    """A training rank. Its parameters are views of one tensor, which raw writes read."""

    def __init__(self, rank: int, model: list[Parameter], key: str) -> None:
        super().__init__(rank, model, key)
        self._held = held_by(model, rank, SENDERS)
        nbytes = sum(each.nbytes for each in self._held.parameters)
        self._flat = torch.empty(nbytes // 2, dtype=torch.bfloat16)
        self._parameters: dict[str, torch.Tensor] = {}
        at = 0
        for number, holding in enumerate(self._held.parameters):
            box = content(holding, number)
            self._parameters[holding.name] = self._flat[at : at + box.numel()].view(box.shape)
            self._parameters[holding.name].copy_(box)
            at += box.numel()
        self._pieces = [
            list(pieces(self._held, wanted_by(model, number, RECEIVERS)))
            for number in range(RECEIVERS)
        ]
        self._places = [
            sum(
                each.nbytes
                for sender in range(rank)
                for each in pieces(held_by(model, sender, SENDERS), wanted)
            )
            for wanted in (wanted_by(model, number, RECEIVERS) for number in range(RECEIVERS))
        ]
        """The offset of raw writes at each receiver, behind the bytes of the previous ranks."""
        self._targets: list[tuple[Peer, bytes]] = []

    def blank(self, way: str) -> None:
        """Does nothing: no weights arrive here."""

    def check(self, way: str) -> None:
        """Does nothing: no weights arrive here."""

    def _connect(self) -> None:
        coordinator = None
        if self._rank == 0:
            self._trainer = self._join(None)
            coordinator = self._trainer.coordinator
        coordinator = all_say(coordinator)[0]
        if self._rank:
            self._trainer = self._join(coordinator)
        receivers = all_say(None)[SENDERS:]
        self._region = self._loop.run(self._open_raw(receivers), SECONDS)
        if self._rank == 0:
            self._trainer.wait_for(RECEIVERS, SECONDS)
        self._version = 0

    def _join(self, coordinator: str | None) -> Trainer:
        return Trainer(
            self._held,
            lambda: self._parameters,
            rank=self._rank,
            world_size=SENDERS,
            cluster_key=self._key,
            coordinator=coordinator,
            settings=UpdateSettings(digests=self._digests, stage_seconds=SECONDS),
            fabrics=[self._fabric],
            peer_timeout=PEER_TIMEOUT_SECONDS,
        )

    async def _open_raw(self, receivers: list[tuple[str, bytes]]) -> MemoryRegion:
        engine = await self._engine("raw")
        self._targets = [
            (await engine.connect(address, timeout=PEER_TIMEOUT_SECONDS), descriptor)
            for address, descriptor in receivers
        ]
        return engine.register(self._flat)

    def _disconnect(self) -> None:
        self._trainer.close()

    def _update(self) -> None:
        self._version += 1
        push = self._trainer.push(self._version)
        push.read(SECONDS)
        self.stage_seconds = push.result(SECONDS).stage_seconds

    def _raw(self) -> None:
        self._loop.run(self._write(), SECONDS)

    async def _write(self) -> None:
        """Writes to the n-th receiver the n-th part of this rank's bytes."""
        operations, at = [], 0
        for (peer, descriptor), parts, place in zip(
            self._targets, self._pieces, self._places, strict=True
        ):
            length = sum(each.nbytes for each in parts)
            at = min(at, self._region.nbytes - length)
            operations.append(
                peer.write(
                    self._region,
                    descriptor,
                    length=length,
                    src_offset=at,
                    dst_offset=place,
                    timeout=SECONDS,
                )
            )
            at += length
        await asyncio.gather(*operations)

    def _gather(self) -> None:
        for each in self._model:
            whole = self._whole[: torch.Size(each.shape).numel()]
            parts = list(as_bytes(whole).chunk(SENDERS)) if self._rank == 0 else None
            ours = as_bytes(self._parameters[each.name])
            dist.gather(ours, parts, dst=0, group=self._trainers)
            if self._rank == 0:
                dist.broadcast(as_bytes(whole), 0, group=self._broadcast)

    def _send(self) -> None:
        numbers = {each.name: number for number, each in enumerate(self._model)}
        sent = []
        for receiver, parts in enumerate(self._pieces):
            for each in parts:
                box = as_bytes(self._parameters[each.name][each.held].contiguous())
                tag = tag_of(numbers[each.name], self._rank, receiver)
                sent.append((box, dist.isend(box, SENDERS + receiver, tag=tag)))
        for _, work in sent:
            work.wait()
