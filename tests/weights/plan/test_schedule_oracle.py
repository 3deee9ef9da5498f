"""Schedules of random models in random layouts, against an oracle that knows every element."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvxfer.weights.document import as_document, parse_map
from kvxfer.weights.maps import Parameters, Part, Side, WeightMap
from kvxfer.weights.plan.schedule import plan_weights
from kvxfer.weights.plan.settings import ScheduleSettings

from . import oracle

MESHES = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"b": 5}]


@st.composite
def kept(draw: st.DrawFn, side: str, mesh: dict[str, int], model: Parameters) -> Parameters:
    """Draws a way to keep the parameters of `model` on ranks of this mesh."""
    axes = draw(st.permutations(sorted(mesh)))
    dimensions = len(model.shape)
    split: list[tuple[str, ...]] = [() for _ in range(dimensions)]
    owner: dict[str, tuple[str, ...]] = {}
    only: dict[str, int] = {}
    ranks = int(np.prod(list(mesh.values())))
    if draw(st.integers(0, 4)) == 0:
        parts = draw(covering(ranks, model.shape))
        event(f"{side}: parts")
        return msgspec.structs.replace(model, parts=parts)
    for axis in axes:
        way = draw(st.sampled_from(["replicas", "split", "split", "owner", "only"]))
        if way == "split":
            dimension = draw(st.integers(0, dimensions - 1))
            split[dimension] += (axis,)
        elif way == "owner" and model.each:
            index = draw(st.sampled_from(sorted(model.each)))
            owner[index] = (*owner.get(index, ()), axis)
        elif way == "only":
            only[axis] = draw(st.integers(0, mesh[axis] - 1))
        event(f"{side}: {way}")
    padding: tuple[int, ...] = ()
    if draw(st.booleans()):
        padding = tuple(draw(st.integers(0, 3)) for _ in range(dimensions))
        event(f"{side}: padding")
    shape = tuple(map(sum, zip(model.shape, padding or (0,) * dimensions, strict=True)))
    return msgspec.structs.replace(
        model, shape=shape, split=tuple(split), owner=owner, only=only, padding=padding
    )


@st.composite
def covering(draw: st.DrawFn, ranks: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Draws boxes that together cover the parameter; they may overlap."""
    free = list(draw(st.permutations(range(ranks))))
    cut = draw(st.integers(0, shape[0])) if ranks > 1 else 0
    wide = draw(st.integers(0, 2))
    zeros = (0,) * (len(shape) - 1)
    ends = [(0, min(shape[0], cut + wide)), (cut, shape[0])]
    parts = []
    for first, end in ends:
        if first < end and free:
            count = draw(st.integers(1, max(1, len(free) - 1)))
            holders, free = free[:count], free[count:]
            parts.append(
                Part(
                    ranks=tuple(holders),
                    offset=(first, *zeros),
                    shape=(end - first, *shape[1:]),
                )
            )
    covered = {
        row for part in parts for row in range(part.offset[0], part.offset[0] + part.shape[0])
    }
    if len(covered) < shape[0]:
        return (Part(ranks=(0,), offset=(0,) * len(shape), shape=shape),)
    return tuple(parts)


@st.composite
def maps(draw: st.DrawFn) -> WeightMap:
    models = [
        Parameters(
            name="".join([f"m{at}", *(f".{{{index}}}" for index in ranges)]),
            shape=tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))),
            dtype=draw(st.sampled_from(["bfloat16", "float32", "uint8"])),
            each=ranges,
        )
        for at in range(draw(st.integers(1, 3)))
        for ranges in [
            {
                index: (first, first + draw(st.integers(1, 4)))
                for index in ["layer", "expert"][: draw(st.integers(0, 2))]
                for first in [draw(st.integers(0, 2))]
            }
        ]
    ]
    train, infer = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    held = [draw(kept("train", train, each)) for each in models]
    wanted = [draw(kept("infer", infer, each)) for each in models]
    tied_there: dict[str, str] = {}
    tied_here: dict[str, str] = {}
    if draw(st.booleans()):  # another name for the first parameter
        target = models[0].names()[0]
        tied_there = {"other": target}
        if draw(st.booleans()):
            tied_here = {"other": target}
        other = Parameters(name="other", shape=models[0].shape, dtype=models[0].dtype)
        wanted.append(draw(kept("infer", infer, other)))
        event("tied on both sides" if tied_here else "tied at training")
    labels = [draw(st.booleans()) for _ in range(2)]

    def side(mesh: dict[str, int], parameters: list[Parameters], tied: dict[str, str]) -> Side:
        ranks = range(int(np.prod(list(mesh.values()))))
        return Side(
            mesh=mesh,
            parameters=tuple(parameters),
            tied=tied,
            nics=draw(st.integers(1, 2)),
            hosts=tuple(f"h{rank // 2}" for rank in ranks) if labels[0] else (),
            zones=tuple(f"z{rank // 3}" for rank in ranks) if labels[1] else (),
        )

    return WeightMap(train=side(train, held, tied_there), infer=side(infer, wanted, tied_here))


@st.composite
def sizes(draw: st.DrawFn) -> ScheduleSettings:
    slices = draw(st.sampled_from([16, 40, 256, 1 << 20]))
    gather = draw(st.sampled_from([1, 8, slices // 2]))
    return ScheduleSettings(
        slice_bytes=slices, gather_bytes=gather, burst_bytes=slices * draw(st.sampled_from([1, 3]))
    )


@settings(max_examples=300)
@given(maps(), sizes())
def test_every_wanted_element_is_written_once_from_a_rank_that_holds_it(
    weights: WeightMap, sizes: ScheduleSettings
) -> None:
    schedule = plan_weights(weights, sizes)
    memory, (often, in_flight) = oracle.run(schedule)
    wanted = oracle.Model(weights).wanted()
    assert memory.keys() == wanted.keys()
    for key, expected in wanted.items():
        assert (memory[key] == expected).all(), key
    assert often <= 1
    assert in_flight <= sizes.burst_bytes
    assert schedule.figures.largest_write <= sizes.slice_bytes
    figures = schedule.figures
    sent = [list(schedule.writes_of(rank)) for rank in range(weights.train.ranks)]
    assert figures.writes == sum(map(len, sent))
    assert figures.senders.most == max(sum(write.nbytes for write in each) for each in sent)
    missing = sum(
        int((each == oracle.NOTHING).sum()) * oracle.item_bytes(weights, name)
        for (_, name), each in wanted.items()
    )
    assert figures.padding_bytes == missing
    assert figures.nbytes + missing == sum(
        each.size * oracle.item_bytes(weights, name) for (_, name), each in wanted.items()
    )


@settings(max_examples=30)
@given(maps(), sizes())
def test_equal_maps_give_equal_schedules_also_through_json(
    weights: WeightMap, sizes: ScheduleSettings
) -> None:
    again = parse_map(as_document(weights), "again")
    assert again == weights

    def encoded(weights: WeightMap) -> bytes:
        schedule = plan_weights(weights, sizes)
        ranks = range(weights.train.ranks)
        return msgspec.json.encode([list(schedule.writes_of(rank)) for rank in ranks])

    assert encoded(weights) == encoded(again)
