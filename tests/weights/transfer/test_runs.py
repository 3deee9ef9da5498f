"""The runs of both sides, against whole arrays: hypothesis draws maps, and runs copy the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.plan.settings import ScheduleSettings
from kvxfer.weights.transfer.arena import ALIGNMENT, arena_of
from kvxfer.weights.transfer.member_plan import schedule_of, sent_by, sent_to
from kvxfer.weights.transfer.messages import Plan, Target
from kvxfer.weights.transfer.runs import Stretch, source_digest, target_digest
from kvxfer.weights.transfer.sending import Batch, Pages, batches_of

from .job import boxes


class _Bytes:
    """A region with a simple checksum, which depends on places but not on order."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def checksum(self, offsets: np.ndarray, numbers: np.ndarray, length: int) -> int:
        return sum(
            hash((number, self.data[at : at + length].tobytes()))
            for at, number in zip(offsets.tolist(), numbers.tolist(), strict=True)
        )


@st.composite
def _split(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[tuple[slice, ...] | None]:
    """Draws a box for each rank: shards along one dimension, or replicas."""
    whole = tuple(slice(0, size) for size in shape)
    if draw(st.booleans()):
        return [whole] * ranks
    along = draw(st.integers(0, len(shape) - 1))
    length = -(-shape[along] // ranks)
    found: list[tuple[slice, ...] | None] = []
    for rank in range(ranks):
        first, end = min(rank * length, shape[along]), min((rank + 1) * length, shape[along])
        box = (*whole[:along], slice(first, end), *whole[along + 1 :])
        found.append(box if first < end else None)
    return found


@st.composite
def _plans(draw: st.DrawFn) -> tuple[Plan, dict[str, np.ndarray]]:
    train, infer = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    held: list[list[Holding]] = [[] for _ in range(train)]
    wanted: list[list[Holding]] = [[] for _ in range(infer)]
    whole: dict[str, np.ndarray] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        name = f"p{number}"
        size = int(np.prod(shape))
        whole[name] = (np.arange(size, dtype=np.float32) + 1000 * number).reshape(shape)
        for ranks, rows in ((train, held), (infer, wanted)):
            for rank, box in enumerate(draw(_split(shape, ranks))):
                if box is not None:
                    offset = tuple(each.start for each in box)
                    lengths = tuple(each.stop - each.start for each in box)
                    rows[rank].append(Holding(name, "float32", shape, offset, lengths))
    slice_bytes = draw(st.integers(16, 200))
    plan = Plan(
        "plan",
        0,
        tuple(Holdings(tuple(each)) for each in held),
        tuple(Holdings(tuple(each)) for each in wanted),
        tuple(Target("i", rank, "") for rank in range(infer)),
        ScheduleSettings(slice_bytes=slice_bytes, gather_bytes=slice_bytes // 2, burst_bytes=512),
    )
    return plan, whole


def _rows(batch: Batch) -> Iterator[tuple[str, int, int, int]]:
    """Yields parameter, offset in the sender's box, offset in the arena, and length of each run."""
    count = len(batch.source_offsets)
    return zip(
        [batch.source] * count if isinstance(batch, Pages) else batch.sources,
        batch.source_offsets.tolist(),
        batch.target_offsets.tolist(),
        [batch.length] * count if isinstance(batch, Pages) else batch.lengths.tolist(),
        strict=True,
    )


@settings(max_examples=150, deadline=None)
@given(_plans())
def test_runs_fill_each_arena_once(drawn: tuple[Plan, dict[str, np.ndarray]]) -> None:
    plan, whole = drawn
    schedule = schedule_of(plan)
    memory = [np.full(arena_of(each).nbytes, 0xEE, np.uint8) for each in plan.infer]
    filled = [np.zeros(arena_of(each).nbytes, np.int64) for each in plan.infer]
    for sender, holdings in enumerate(plan.train):
        regions = {
            name: box.reshape(-1).view(np.uint8) for name, box in boxes(holdings, whole).items()
        }
        for receiver, bursts in sent_by(schedule, plan, sender).items():
            for batch in batches_of(bursts):
                for name, source, target, length in _rows(batch):
                    memory[receiver][target : target + length] = regions[name][
                        source : source + length
                    ]
                    filled[receiver][target : target + length] += 1
            told = source_digest(
                [each for burst in bursts for each in burst],
                {name: _Bytes(data) for name, data in regions.items()},
            )
            found = target_digest(
                sent_to(schedule, plan, receiver)[sender], _Bytes(memory[receiver])
            )
            assert found == told
    for number, holdings in enumerate(plan.infer):
        places = arena_of(holdings).places
        assert sum(place.nbytes for place in places.values()) == filled[number].sum()
        for name, box in boxes(holdings, whole).items():
            place = places[name]
            assert place.offset % ALIGNMENT == 0
            inside = slice(place.offset, place.offset + place.nbytes)
            assert (filled[number][inside] == 1).all()
            found_box = memory[number][inside].view(np.float32).reshape(box.shape)
            np.testing.assert_array_equal(found_box, box)


def test_many_runs_of_one_length_are_pages_and_the_others_a_list() -> None:
    columns = _stretch("o_proj", np.arange(40) * 64, 32)
    row = _stretch("norm", np.array([0]), 4096)
    [pages, runs] = batches_of(((columns, row),))
    assert isinstance(pages, Pages)
    assert [each[0] for each in _rows(pages)] == ["o_proj"] * 40
    assert list(_rows(runs)) == [("norm", 0, 0, 4096)]


def _stretch(name: str, offsets: np.ndarray, length: int) -> Stretch:
    return Stretch(name, length, offsets, offsets)
