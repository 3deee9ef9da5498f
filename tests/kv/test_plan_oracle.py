"""Plans of random pairs of instances, against an oracle that knows every element by its name.

Every number in a cache is the identity of an element: layer, token, K or V, head and dimension.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.kv.admission import CurrentIdentity
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.cache import KvCache, permute_on_host
from kvxfer.kv.connection import hello_from
from kvxfer.kv.options import KvIdentity
from kvxfer.kv.plan import TransferPlan, plan_transfer
from kvxfer.kv.plane_writes import bind_arrivals, bind_plan
from kvxfer.kv.ranks import sources, targets
from kvxfer.layout import KvLayout, LayerShape

from .steered import Engine

UNTOUCHED = 0xFFFFFFFF


@dataclass(frozen=True)
class Case:
    """A pair of instances, given by the layouts of their first ranks, and a prompt."""

    prefill: KvLayout
    decode: KvLayout
    tokens: int
    seed: int
    permutes: bool


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mla = draw(st.booleans()) if draw(st.integers(0, 3)) == 0 else False
    num_heads = 1 if mla else draw(st.sampled_from([1, 2, 3, 4]))
    num_layers = draw(st.sampled_from([1, 2, 3]))
    packing = "" if mla else draw(st.sampled_from(["", "", "vec", "amx"]))
    unit = 16 if packing == "amx" else 1
    head_size = unit * draw(st.sampled_from([1, 2]))
    joined = not packing and draw(st.booleans())
    # Some layers have another shape: a latent vector, or heads of another size.
    some = draw(st.integers(0, 2)) == 0
    # They may be a KV cache group whose blocks hold more tokens, on both sides.
    many = draw(st.sampled_from([1, 2, 3])) if some and draw(st.booleans()) else 0
    size = unit * draw(st.sampled_from([1, 2, 3, 4])) if many else 0
    latent = draw(st.booleans())
    layer_shapes = tuple(draw(st.sampled_from([[0, 1], [1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1]])))
    if some:
        num_layers = len(layer_shapes)

    def other() -> LayerShape:
        return LayerShape(
            num_kv_heads=1 if latent else num_heads,
            head_size=3,
            dtype="float32",
            order=draw(st.sampled_from(["NHD", "HND"])),
            kv=draw(st.sampled_from(["separate", "interleaved"])),
            mla=latent,
            block_size=many * size,
        )

    def instance() -> KvLayout:
        return KvLayout(
            num_layers=num_layers,
            num_kv_heads=num_heads,
            head_size=head_size,
            dtype="float32",
            block_size=size or unit * draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
            tp_size=draw(
                st.sampled_from(divisors(num_heads))
                | st.sampled_from([num_heads * 2, num_heads * 3])
            ),
            pp_size=draw(st.sampled_from(divisors(num_layers))),
            order="HND" if packing else draw(st.sampled_from(["NHD", "HND"])),
            kv="opaque"
            if packing
            else "joined"
            if joined
            else draw(st.sampled_from(["separate", "interleaved"])),
            mla=mla,
            packing=packing,
            shapes=(other(),) if some else (),
            layer_shapes=layer_shapes if some else (),
            layer_groups=layer_shapes if many else (),
        )

    return Case(
        prefill=instance(),
        decode=instance(),
        tokens=draw(st.integers(1, 30)) * unit,
        seed=draw(st.integers(0, 1000)),
        permutes=draw(st.booleans()),
    )


@dataclass
class Rank:
    """A rank's cache, and the prompt's blocks in it."""

    layout: KvLayout
    cache: KvCache
    blocks: np.ndarray[Any, Any]
    """Block tables, a row for each group."""
    memory: np.ndarray[Any, Any]


def rank_of(layout: KvLayout, tokens: int, rng: random.Random) -> Rank:
    # The number of entries of its table that a block takes, by group.
    entries = [1] * layout.num_groups
    for layer, group in enumerate(layout.layer_groups):
        large = (
            layout.shapes[layout.layer_shapes[layer] - 1] if layout.layer_shapes[layer] else None
        )
        entries[group] = large.block_size // layout.block_size if large else 1
    needed = -(-layout.blocks_for(tokens) // max(entries)) * max(entries)
    num_blocks = 2 * needed + 2
    engine: Any = Engine("rank")
    cache = KvCache.allocate(engine, layout, num_blocks)
    blocks = np.full((layout.num_groups, needed), ABSENT, dtype=np.int32)
    free = rng.sample(range(num_blocks), num_blocks)
    for row, span in zip(blocks, entries, strict=True):
        for block in range(-(-tokens // (span * layout.block_size))):
            row[(block + 1) * span - 1] = free.pop()
    memory = np.frombuffer(cache.planes[0][0].region.data, np.uint32)
    memory[:] = UNTOUCHED
    return Rank(layout, cache, blocks, memory)


def place(rank: Rank, layer: int, token: int, vector: int, head: int, dim: int) -> int:
    """Returns the place of an element in a rank's memory; layers and heads count on the rank."""
    layout = rank.layout.of_layer(layer)
    span = layout.block_size // rank.layout.block_size
    row_of_group = rank.blocks[rank.layout.group_of(layer)]
    block = int(row_of_group[(token // layout.block_size + 1) * span - 1])
    row = token % layout.block_size
    if layout.packing:
        within = (head * 2 + vector) * layout.block_size * layout.head_size
        within += packed(layout, row, vector, dim)
    elif layout.order == "NHD":
        within = (row * layout.heads_per_rank + head) * layout.head_size + dim
    else:
        within = (head * layout.block_size + row) * layout.head_size + dim
    if not layout.mla and layout.kv == "interleaved":
        within += vector * layout.block_size * layout.heads_per_rank * layout.head_size
    plane = rank.cache.planes[layer][vector if len(layout.parts) == 2 else 0]
    return (plane.offset + block * plane.block_stride) // 4 + within


def packed(layout: KvLayout, row: int, vector: int, dim: int) -> int:
    """Returns the place within K or V of a head of a block, as vLLM's kernels compute it."""
    tokens, dims = layout.block_size, layout.head_size
    if layout.packing == "vec":
        return dim * tokens + row if vector == 0 else row * dims + dim
    if vector == 0:  # K: tiles of 16 tokens, in which two dimensions are neighbours
        return row // 16 * 16 * dims + dim // 2 * 32 + row % 16 * 2 + dim % 2
    return dim // 16 * tokens * 16 + row // 2 * 32 + dim % 16 * 2 + row % 2


def expected(rank: Rank, case: Case) -> np.ndarray[Any, Any]:
    """Returns the memory of a rank that holds the prompt, element by element.

    Whole blocks are copied, up to the end of the shorter side's last block.
    """
    memory = np.full_like(rank.memory, UNTOUCHED)
    for layer in range(rank.layout.layers_per_rank):
        layout = rank.layout.of_layer(layer)
        whole = rank.layout.first_layer + layer
        shape = rank.layout.layer_shapes[whole] if rank.layout.shapes else 0
        both = [side.of_shape(shape) for side in (case.prefill, case.decode)]
        room = min(side.blocks_for(case.tokens) * side.block_size for side in both)
        for token in range(room):
            for vector in range(1 if layout.mla or layout.joined else 2):
                for head in range(layout.heads_per_rank):
                    # A rank has one of the replicated heads: rank r of 6 for 2 heads has r // 3.
                    whole = (
                        layout.tp_rank // (layout.tp_size // layout.num_kv_heads)
                        if layout.tp_size > layout.num_kv_heads
                        else layout.tp_rank * layout.heads_per_rank + head
                    )
                    name = (layout.pp_rank * layout.layers_per_rank + layer) * 1000 + token
                    for dim in range(layout.head_size):
                        memory[place(rank, layer, token, vector, head, dim)] = (
                            (name * 2 + vector) * 10 + whole
                        ) * 10 + dim
    return memory


def runs_at_decode(
    plan: TransferPlan, prefill: Rank, decode: Rank
) -> dict[int, tuple[Any, int, int]]:
    """Returns the runs that decode expects, by their numbers."""
    found = {}
    for arrival in bind_arrivals(plan, decode.cache):
        counted = np.arange(prefill.blocks.shape[1])
        _, places, numbers = arrival.runs.offsets(counted, decode.blocks[arrival.group])
        plane = arrival.plane
        for number, at in zip(numbers + arrival.first_number, places + plane.offset, strict=True):
            found[number] = (plane.region, at, arrival.runs.length)
    return found


def receive(case: Case, prefills: list[Rank], decode: Rank, written: np.ndarray[Any, Any]) -> None:
    """Applies all writes of prefill ranks to a decode rank, and counts them by element."""
    hello = hello_from(decode.cache, CurrentIdentity(KvIdentity("d", bytes(32), 1), SYSTEM_CLOCK))
    orders = set()
    for prefill in prefills:
        plan = plan_transfer(prefill.layout, decode.layout, decode_permutes=case.permutes)
        orders.add(plan.arrival_order)
        assert bool(plan.layers) <= (prefill.layout.rank in sources(prefill.layout, decode.layout))
        lows = [int(row[row >= 0].min()) for row in decode.blocks]
        granted = [
            decode.cache.planes[layer.dst_layer][part]
            for layer in plan.layers
            for part in range(len(decode.layout.of_layer(layer.dst_layer).parts))
        ]
        assert len(granted) == plan.first_grants[-1]
        numbered = {}
        for layer in bind_plan(plan, prefill.cache, hello):
            for write in layer:
                low, row = lows[write.group], decode.blocks[write.group]
                ids = np.where(row < 0, row, row - low)
                src, dst, numbers = write.runs.offsets(prefill.blocks[write.group], ids)
                plane = granted[write.dst]
                base = plane.offset + low * plane.block_stride
                for number, to in zip(numbers + write.first_number, dst + base, strict=True):
                    assert number not in numbered
                    numbered[number] = (plane.region, to, write.runs.length)
                for begin, to in zip(src + write.src.offset, dst + base, strict=True):
                    end = begin + write.runs.length
                    span = slice(to // 4, (to + write.runs.length) // 4)
                    decode.memory[span] = prefill.memory[begin // 4 : end // 4]
                    written[span] += 1
        assert numbered == runs_at_decode(plan, prefill, decode)
    assert len(orders) == 1
    if orders != {decode.layout.order}:
        [row] = decode.blocks
        permute_on_host(decode.cache, row, orders.pop())


@settings(max_examples=300, derandomize=True, deadline=None)
@given(cases())
def test_every_element_gets_to_its_place_once(case: Case) -> None:
    rng = random.Random(case.seed)
    prefills, decodes = (
        [rank_of(layout.of_rank(rank), case.tokens, rng) for rank in range(layout.num_ranks)]
        for layout in (case.prefill, case.decode)
    )
    for prefill in prefills:
        prefill.memory[:] = expected(prefill, case)
        assert targets(prefill.layout, case.decode)
    for decode in decodes:
        written = np.zeros_like(decode.memory)
        receive(case, prefills, decode, written)
        wanted = expected(decode, case)
        np.testing.assert_array_equal(decode.memory, wanted)
        assert written.max() == 1
        assert written.sum() == np.count_nonzero(wanted != UNTOUCHED)
    plan = plan_transfer(case.prefill, case.decode, decode_permutes=case.permutes)
    event(f"permutes: {plan.permutes}")
    event(f"packing: {case.prefill.packing or 'none'}")
    event(f"layers of several shapes: {bool(case.prefill.shapes)}")
    event(f"larger blocks in a group: {any(each.block_size for each in case.prefill.shapes)}")
    event(f"same block size: {case.prefill.block_size == case.decode.block_size}")


@settings(max_examples=300, derandomize=True, deadline=None)
@given(cases())
def test_sources_and_targets_are_two_views_of_the_same_pairs(case: Case) -> None:
    seen = {
        (source, rank)
        for rank in range(case.decode.num_ranks)
        for source in sources(case.prefill, case.decode.of_rank(rank))
    }
    assert seen == {
        (rank, target)
        for rank in range(case.prefill.num_ranks)
        for target in targets(case.prefill.of_rank(rank), case.decode)
    }
    assert {source for source, _ in seen} == set(range(case.prefill.num_ranks))
    assert {target for _, target in seen} == set(range(case.decode.num_ranks))
