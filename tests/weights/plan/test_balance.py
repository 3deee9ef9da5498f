"""The choice of the rank and NIC that send data that several ranks hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from kvxfer.weights.maps import Parameters, Part, Side, WeightMap
from kvxfer.weights.plan.balance import Lot, Near, Span, deal
from kvxfer.weights.plan.cuts import cut
from kvxfer.weights.plan.schedule import Schedule, plan_weights
from kvxfer.weights.plan.settings import ScheduleSettings

SMALL = ScheduleSettings(slice_bytes=1 << 16, gather_bytes=1 << 10, burst_bytes=1 << 20)


def layers(count: int, rows: int = 64, **kept: object) -> Parameters:
    """`count` parameters of `rows` KiB each."""
    return Parameters(
        name="layer.{layer}",
        shape=(rows, 1024),
        dtype="uint8",
        each={"layer": (0, count)},
        **kept,
    )


def plan(train: Side, infer: Side) -> Schedule:
    return plan_weights(WeightMap(train=train, infer=infer), SMALL)


@pytest.mark.parametrize("replicas", [2, 3, 4, 7])
def test_replicas_share_the_load(replicas: int) -> None:
    train = Side(
        mesh={"replica": replicas, "shard": 4},
        parameters=(layers(61, split=(("shard",), ())),),
    )
    infer = Side(mesh={"tp": 3}, parameters=(layers(61, split=(("tp",), ())),))
    figures = plan(train, infer).figures
    assert figures.senders.balance <= 1.05


def test_one_large_parameter_is_shared_by_its_replicas() -> None:
    train = Side(mesh={"replica": 8}, parameters=(layers(1, rows=4096),))
    infer = Side(mesh={"replica": 2}, parameters=(layers(1, rows=4096),))
    figures = plan(train, infer).figures
    assert figures.senders.balance == 1.0
    assert figures.writes == 2 * 4096 // 64


def test_replicas_relieve_ranks_that_alone_hold_other_bytes() -> None:
    alone = Parameters(name="alone", shape=(640, 1024), dtype="uint8", only={"rank": 0})
    train = Side(mesh={"rank": 3}, parameters=(alone, layers(20)))
    infer = Side(
        mesh={"rank": 1},
        parameters=(Parameters(name="alone", shape=(640, 1024), dtype="uint8"), layers(20)),
    )
    schedule = plan(train, infer)
    sent = [sum(write.nbytes for write in schedule.writes_of(rank)) for rank in range(3)]
    assert sent == [640 << 10] * 3


def held_by(name: str, ranks: tuple[int, ...], rows: int) -> tuple[Parameters, Parameters]:
    """Returns a parameter of `rows` KiB as these training ranks have it, and as one inference rank
    wants it."""
    wanted = Parameters(name=name, shape=(rows, 1024), dtype="uint8")
    part = Part(ranks=ranks, offset=(0, 0), shape=(rows, 1024))
    return structs.replace(wanted, parts=(part,)), wanted


def test_later_parameters_move_those_assigned_before() -> None:
    """Rank 1 can relieve rank 0, but not rank 2."""
    pairs = [
        held_by("alone", (2,), 6400),
        held_by("early", (0, 1), 6400),
        held_by("late", (0, 2), 5760),
    ]
    train = Side(mesh={"rank": 3}, parameters=tuple(held for held, _ in pairs))
    infer = Side(mesh={"rank": 1}, parameters=tuple(wanted for _, wanted in pairs))
    assert plan(train, infer).figures.senders.balance <= 1.05


def test_near_ranks_send_where_balance_allows() -> None:
    hosts = ("a", "a", "b", "b")
    train = Side(mesh={"replica": 4}, parameters=(layers(64),), hosts=hosts)
    infer = Side(mesh={"replica": 4}, parameters=(layers(64),), hosts=hosts)
    schedule = plan(train, infer)
    pairs: Counter[bool] = Counter()
    for rank in range(4):
        for write in schedule.writes_of(rank):
            pairs[hosts[rank] == hosts[write.receiver]] += write.nbytes
    assert pairs[True] / pairs.total() > 0.95
    assert schedule.figures.senders.balance <= 1.05


def test_nearness_does_not_cost_balance() -> None:
    """All receivers are near the same rank, which would send everything."""
    zones = ("a", "b", "b", "b")
    train = Side(mesh={"replica": 4}, parameters=(layers(64),), zones=zones)
    infer = Side(mesh={"replica": 4}, parameters=(layers(64),), zones=("a",) * 4)
    assert plan(train, infer).figures.senders.balance <= 1.05


def test_near_ranks_are_not_preferred_where_whole_slices_make_that_uneven() -> None:
    """Rank 0 sends 5 bytes in any case. Rank 1, which is near, would send 15 of the 22 others."""
    lots = [
        Lot((0, 1), 0, (Span(0, 0, 2, 5.0),), 1.0),
        Lot((0, 1), 0, (Span(1, 0, 6, 2.0),), 1.0),
    ]
    sent = [5.0, 0.0]
    for rank, span in deal(lots, np.array([5, 0]), [Near(("b", "a"), ("a",))]):
        sent[rank] += span.nbytes
    assert sorted(sent) == [13.0, 14.0]


def test_nics_of_a_rank_share_its_bytes() -> None:
    train = Side(mesh={"shard": 2}, parameters=(layers(50, split=(("shard",), ())),), nics=4)
    infer = Side(mesh={"tp": 1}, parameters=(layers(50),), nics=3)
    figures = plan(train, infer).figures
    assert figures.sender_nics.mean == figures.senders.mean / 4
    assert figures.sender_nics.balance <= 1.05
    assert figures.receiver_nics.balance <= 1.05


def test_small_parameters_are_written_together() -> None:
    """Every rank has a row of each; alone these would be 61 writes of 64 bytes for each pair."""
    norms = Parameters(name="n.{i}", shape=(256,), dtype="uint8", each={"i": (0, 61)})
    shard = Parameters(
        name="n.{i}", shape=(256,), dtype="uint8", each={"i": (0, 61)}, split=(("shard",),)
    )
    train = Side(mesh={"replica": 16, "shard": 4}, parameters=(shard,))
    figures = plan(train, Side(mesh={"replica": 8}, parameters=(norms,))).figures
    # 3,904 bytes of each shard for each receiver: at most three replicas share 1 KiB or more each.
    assert 4 * 8 <= figures.writes <= 3 * 4 * 8
    assert figures.nbytes / figures.writes > 1024


def test_a_burst_takes_from_many_senders_and_serves_many_receivers() -> None:
    train = Side(mesh={"shard": 8}, parameters=(layers(61, split=(("shard",), ())),))
    infer = Side(mesh={"replica": 4}, parameters=(layers(61),))
    schedule = plan(train, infer)
    for burst in range(schedule.figures.bursts):
        pairs = {
            (rank, write.receiver)
            for rank in range(8)
            for write in schedule.writes_of(rank)
            if write.burst == burst
        }
        assert len(pairs) == 8 * 4


@pytest.mark.parametrize(
    ("lengths", "most", "counts"),
    [
        ((10,), 10, (1,)),
        ((10,), 4, (3,)),
        ((8, 4), 8, (4, 1)),
        ((3, 10), 4, (3, 3)),
        ((2, 2, 5), 5, (2, 2, 1)),
        ((2, 2, 5), 1, (2, 2, 5)),
    ],
)
def test_cuts(lengths: tuple[int, ...], most: int, counts: tuple[int, ...]) -> None:
    made = cut(lengths, most)
    assert made.counts == counts
    assert made.elements().max() <= most
    assert made.elements().min() >= 1
