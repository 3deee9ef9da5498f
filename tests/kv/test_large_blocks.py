"""Transfers of caches with a KV cache group whose blocks have more tokens than the others (Gemma
4): such a block stands in the last of the entries that it takes in its block table."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.errors import LayoutMismatch
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout, LayerShape

from .workers import NUM_BLOCKS, Worker, make_ticket, worker

LARGE = LayerShape(num_kv_heads=2, head_size=8, dtype="float32", block_size=12)
LAYOUT = KvLayout(
    num_layers=4,
    num_kv_heads=2,
    head_size=24,
    dtype="float32",
    block_size=4,
    shapes=(LARGE,),
    layer_shapes=(1, 1, 0, 0),
    layer_groups=(0, 1, 2, 2),
)
# 17 tokens: groups 0 and 1 have blocks of 12 tokens; group 1 keeps only the last block.
SOURCE = [
    [ABSENT, ABSENT, 7, ABSENT, ABSENT, 3],
    [ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, 9],
    [1, 4, 8, 2, 6, ABSENT],
]
TARGET = [
    [ABSENT, ABSENT, 11, ABSENT, ABSENT, 5],
    [ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, 0],
    [10, 14, 13, 12, 15, ABSENT],
]


def of_layer(side: Worker, layer: int, block: int) -> list[bytes]:
    layout = side.cache.layout.of_layer(layer)
    size = layout.part_bytes
    planes = [side.cache.buffer(layer, part) for part in layout.parts]
    return [bytes(plane[block * size : (block + 1) * size]) for plane in planes]


@pytest.mark.native
@pytest.mark.parametrize("first", [0, 3, 4])
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checked"])
async def test_each_group_arrives_in_its_own_blocks(
    fabric: str, rng: random.Random, first: int, checksums: bool
) -> None:
    async with (
        worker("prefill", fabric, layout=LAYOUT, checksums=checksums) as prefill,
        worker("decode", fabric, layout=LAYOUT) as decode,
    ):
        prefill.fill(range(NUM_BLOCKS), rng)
        ticket = make_ticket(prefill, decode)
        ours = EngineBlocks(6, 3)
        theirs = EngineBlocks([row[first:] for row in TARGET])
        async with (
            prefill.endpoint.prefill_session(ticket, ours) as session,
            decode.endpoint.decode_session(
                ticket, prefill.engine.address, theirs, first_block=first
            ) as receiver,
        ):
            for until in (2, 5, 6):  # no large block is complete, the first is, all are
                ours.fill([row[:until] for row in SOURCE])
                for layer in range(LAYOUT.num_layers):
                    session.write_layer(layer, until)
            await session.finish()
            await receiver.wait()
            moved = 0
            for layer, group in enumerate(LAYOUT.layer_groups):
                wanted = dict(zip(TARGET[group][first:], SOURCE[group][first:], strict=True))
                wanted.pop(ABSENT, None)
                moved += len(wanted) * LAYOUT.of_layer(layer).block_bytes
                for block in range(NUM_BLOCKS):
                    there = of_layer(decode, layer, block)
                    if block in wanted:
                        assert there == of_layer(prefill, layer, wanted[block])
                    else:
                        assert not any(map(any, there)), f"layer {layer}: block {block}"
            assert session.nbytes == receiver.nbytes == moved
            receiver.take()


def test_a_cycle_of_all_layers_ends_with_the_largest_block() -> None:
    plan = plan_transfer(LAYOUT, LAYOUT)
    assert plan.cycle_tokens == 12
    sizes = [LAYOUT.of_layer(layer).token_bytes for layer in range(4)]
    assert plan.bytes_per_cycle == 12 * sum(sizes)
    assert plan.runs_per_cycle == 2 * (1 + 1 + 3 + 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"shapes": (dataclasses.replace(LARGE, block_size=8),)},
            "block_size is 12 at prefill and 8",
        ),
        ({"block_size": 2}, "block_size is 4 at prefill and 2 at decode"),
    ],
)
def test_other_block_sizes_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(LayoutMismatch, match=named):
        plan_transfer(LAYOUT, dataclasses.replace(LAYOUT, **changes))
