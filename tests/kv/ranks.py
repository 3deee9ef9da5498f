"""A prefill and a decode instance of several ranks, and the parts of a cache that each rank has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.layout import KvLayout

from .workers import (
    Worker,
    make_ticket,
    worker,
)

TOKENS = 11
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_size=16, dtype="bfloat16", block_size=4)
MLA = dataclasses.replace(LAYOUT, num_kv_heads=1, mla=True)


class Ranks:
    """The ranks of a prefill and a decode instance."""

    def __init__(self, prefill: list[Worker], decode: list[Worker]) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def addresses(self) -> list[str]:
        return [rank.engine.address for rank in self.prefill]

    def ticket(self) -> str:
        return make_ticket(self.prefill[0], self.decode[0])

    def fill(self, cache: np.ndarray[Any, Any]) -> None:
        """Writes the cache of a prompt, by (layer, K or V, token, head, byte), into blocks 0, 1,
        …"""
        for rank in self.prefill:
            layout = rank.cache.layout
            put(rank, list(range(layout.blocks_for(TOKENS))), part_of(cache, layout))

    async def offers(self, ticket: str) -> list[DecodeSession]:
        return [
            await rank.endpoint.decode_session(
                ticket, self.addresses, rank.cache.layout.blocks_for(TOKENS)
            )
            for rank in self.decode
        ]

    async def requests(self, ticket: str, stack: contextlib.AsyncExitStack) -> list[PrefillSession]:
        sessions = []
        for rank in self.prefill:
            hold = stack.enter_context(rank.pool.hold(rank.cache.layout.blocks_for(TOKENS)))
            sessions.append(await rank.endpoint.prefill_session(ticket, hold))
        return sessions


def part_of(cache: np.ndarray[Any, Any], layout: KvLayout) -> np.ndarray[Any, Any]:
    """Returns a rank's part of a whole cache."""
    layers = slice(layout.first_layer, layout.first_layer + layout.layers_per_rank)
    heads = slice(layout.first_head, layout.first_head + layout.heads_per_rank)
    return cache[layers, :, :, heads]


def put(rank: Worker, blocks: list[int], part: np.ndarray[Any, Any]) -> None:
    """Writes a rank's part of a cache into its blocks."""
    layout = rank.cache.layout
    vectors = part.shape[1]
    size = layout.block_bytes // vectors
    for layer, vector in np.ndindex(part.shape[:2]):
        name = layout.parts[vector] if len(layout.parts) == 2 else layout.parts[0]
        plane = np.frombuffer(rank.cache.buffer(layer, name), np.uint8)
        tokens = part[layer, vector]
        for index, block in enumerate(blocks):
            begin = index * layout.block_size
            some = np.zeros((layout.block_size, *tokens.shape[1:]), np.uint8)
            some[: len(tokens) - begin] = tokens[begin : begin + layout.block_size]
            if layout.order == "HND":
                some = some.swapaxes(0, 1)
            at = block * layout.part_bytes + (vector * size if len(layout.parts) == 1 else 0)
            plane[at : at + size] = some.reshape(-1)


@contextlib.asynccontextmanager
async def fleet(
    fabric: str, prefill: KvLayout, decode: KvLayout, **options: Any
) -> AsyncIterator[Ranks]:
    async with contextlib.AsyncExitStack() as stack:

        async def ranks(name: str, layout: KvLayout) -> list[Worker]:
            return [
                await stack.enter_async_context(
                    worker(
                        f"{name}{rank}",
                        fabric,
                        layout=layout.of_rank(rank),
                        instance_id=name,
                        **options,
                    )
                )
                for rank in range(layout.num_ranks)
            ]

        yield Ranks(await ranks("p", prefill), await ranks("d", decode))


def sized(layout: KvLayout, tp: int, pp: int, **changes: Any) -> KvLayout:
    return dataclasses.replace(layout, tp_size=tp, pp_size=pp, **changes)
