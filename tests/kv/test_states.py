"""The state of recurrent layers: one block of a prompt, in sections that ranks share by heads."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.errors import InvalidArgument, LayoutMismatch
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.plan import plan_transfer
from kvxfer.kv.ranks import bytes_per_token
from kvxfer.layout import KvLayout, LayerShape

from .workers import NUM_BLOCKS, make_ticket, worker

STATE = LayerShape(
    num_kv_heads=4,
    head_size=23,
    dtype="uint8",
    order="HND",
    kv="state",
    packing="of a test",
    sections=(3, 3, 7, 10),
)
LAYOUT = KvLayout(
    num_layers=4,
    num_kv_heads=4,
    head_size=8,
    dtype="float16",
    block_size=4,
    layer_groups=(0, 1, 0, 1),
    shapes=(STATE,),
    layer_shapes=(0, 1, 0, 1),
)


def changed(**changes: Any) -> KvLayout:
    return dataclasses.replace(LAYOUT, shapes=(dataclasses.replace(STATE, **changes),))


def state_on(rank: KvLayout) -> bytes:
    """Returns a rank's state, in which byte b of section s of head h is named (s, h, b)."""
    heads = range(rank.first_head, rank.first_head + rank.heads_per_rank)
    return bytes(
        section * 50 + head * 12 + at
        for section, size in enumerate(rank.sections)
        for head in heads
        for at in range(size)
    )


@pytest.mark.parametrize("decode_size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefill_size", [1, 2, 4, 8])
def test_ranks_share_each_section_by_its_heads(prefill_size: int, decode_size: int) -> None:
    state = dataclasses.replace(LAYOUT.of_shape(1), num_layers=1, layer_groups=(0,))
    prefill = dataclasses.replace(state, tp_size=prefill_size)
    for rank in range(decode_size):
        decode = dataclasses.replace(state, tp_size=decode_size, tp_rank=rank)
        wanted = state_on(decode)
        assert len(wanted) == decode.block_bytes == decode.part_bytes
        block, times = bytearray(len(wanted)), [0] * len(wanted)
        for source in map(prefill.of_rank, range(prefill_size)):
            for copy in (c for layer in plan_transfer(source, decode).layers for c in layer.copies):
                assert (copy.count, copy.src_block, copy.dst_block) == (1, 0, 0)
                end = copy.dst_offset + copy.length
                held = state_on(source)[copy.src_offset : copy.src_offset + copy.length]
                block[copy.dst_offset : end] = held
                times[copy.dst_offset : end] = [n + 1 for n in times[copy.dst_offset : end]]
        assert set(times) == {1}
        assert bytes(block) == wanted


@pytest.mark.native
@pytest.mark.parametrize("checksums", [False, True])
async def test_the_last_block_has_the_state(
    fabric: str, rng: random.Random, checksums: bool
) -> None:
    source = [[3, 1, 4], [ABSENT, ABSENT, 9]]
    target = [[6, 8, 7], [ABSENT, ABSENT, 0]]
    async with (
        worker("prefill", fabric, layout=LAYOUT, checksums=checksums) as prefill,
        worker("decode", fabric, layout=LAYOUT) as decode,
    ):
        prefill.fill(range(NUM_BLOCKS), rng)
        ticket = make_ticket(prefill, decode)
        ours, theirs = EngineBlocks(3, 2), EngineBlocks(3, 2)
        theirs.fill(target)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, theirs)
        async with prefill.endpoint.prefill_session(ticket, ours) as session:
            for until in (1, 3):
                ours.fill([row[:until] for row in source])
                for layer in range(4):
                    session.write_layer(layer, until)
            await session.finish()
            await receiver.wait()
            sizes = [LAYOUT.of_layer(layer).block_bytes for layer in (0, 1)]
            assert session.nbytes == receiver.nbytes == 2 * (3 * sizes[0] + sizes[1])
        receiver.take()
        for layer in range(4):
            of_layer, group = LAYOUT.of_layer(layer), layer % 2
            for part in of_layer.parts:
                sent, found = (bytes(w.cache.buffer(layer, part)) for w in (prefill, decode))
                size = of_layer.part_bytes
                wanted = bytearray(len(found))
                for src, dst in zip(source[group], target[group], strict=True):
                    if dst != ABSENT:
                        wanted[dst * size : (dst + 1) * size] = sent[src * size : (src + 1) * size]
                assert found == wanted, layer


def test_a_state_has_no_tokens() -> None:
    state = LAYOUT.of_layer(1)
    assert (state.token_bytes, state.vector_bytes, state.block_bytes) == (0, 23, 4 * 23)
    assert bytes_per_token(LAYOUT, LAYOUT) == 2 * LAYOUT.of_layer(0).token_bytes
    assert LAYOUT.stack_bytes == 2 * (LAYOUT.of_layer(0).block_bytes + 4 * 23)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (changed(packing="another"), "packing is 'of a test' at prefill and 'another' at decode"),
        (changed(sections=(6, 7, 10)), r"sections is \(3, 3, 7, 10\) at prefill"),
        (changed(num_kv_heads=8), "num_kv_heads is 4 at prefill and 8 at decode"),
        (dataclasses.replace(LAYOUT, block_size=8), "block_size is 4 at prefill and 8 at decode"),
    ],
)
def test_the_error_names_the_field_in_which_states_differ(other: KvLayout, field: str) -> None:
    with pytest.raises(LayoutMismatch, match=field):
        plan_transfer(LAYOUT, other)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sections": ()}, r"sections is \(\) with kv='state' and head_size 23"),
        ({"sections": (3, 3, 7)}, "sizes that add up to head_size"),
        ({"sections": (23, 0)}, "sizes that add up to head_size"),
        ({"sections": (20, "3")}, "sizes that add up to head_size"),
        ({"sections": (1,) * 65, "head_size": 65}, "sections has a length of 65; use 64 or less"),
        ({"order": "NHD"}, "order is 'NHD' with kv='state'"),
        ({"kv": "opaque"}, r"sections is \(3, 3, 7, 10\) with kv='opaque'"),
        ({"head_size": (1 << 30) + 1}, "head_size is 1073741825; use 1073741824 or less"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_state(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        changed(**changes)
