"""Every attack of `make attack` on each fabric is refused and counted, and changes and leaves
nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from verify.attack import answers, control_plane, floods, members, outsiders, transfers
from verify.attack.attack import Attack, Fabric, Flood, run, run_flood
from verify.attack.control_plane import Plane
from verify.attack.on_path import Place, altered_stream
from verify.attack.pair import Pair, workers
from verify.attack.table import FABRICS

pytestmark = pytest.mark.native

MODULES = (outsiders, answers, members, transfers, floods)
ALL = [one for module in MODULES for one in module.ATTACKS]


def on_each_fabric(kind: type[Attack] | type[Flood]) -> pytest.MarkDecorator:
    found = [
        pytest.param(fabric, one, id=f"{fabric}-{one.name}")
        for fabric in FABRICS
        for one in ALL
        if isinstance(one, kind) and fabric in one.fabrics
    ]
    return pytest.mark.parametrize(("pair", "attack"), found, indirect=["pair"])


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[Fabric], Pair]]:
    """One pair of each fabric for all of its attacks."""
    with ExitStack() as stack:
        yield cache(lambda fabric: stack.enter_context(workers(fabric)))


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Callable[[Fabric], Pair]) -> Pair:
    return pairs(request.param)


@on_each_fabric(Attack)
def test_attack_is_refused_and_counted(attack: Attack, pair: Pair, rng: random.Random) -> None:
    row = run(attack, pair, rng)
    assert row.attempts > 0
    assert not row.problems, row


@on_each_fabric(Flood)
def test_flood_is_bounded_and_honest_transfers_go_on(
    attack: Flood, pair: Pair, rng: random.Random
) -> None:
    # `make attack` measures their speed.
    row = run_flood(attack, pair, rng, rounds=1, most=1, transfers=4, least_share=0)
    assert row.attempts > 0
    assert not row.problems, row
    assert row.fds_growth < 600, row


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with control_plane.control_plane() as running:
        yield running


@pytest.mark.parametrize("attack", control_plane.ATTACKS, ids=lambda one: one[0])
def test_rest_attack_is_refused_and_counted(attack, plane: Plane, rng: random.Random) -> None:
    row = control_plane.run(*attack, plane, rng)
    assert row.attempts > 0
    assert not row.problems, row


@pytest.mark.parametrize("place", ["page", "header"])
def test_checksums_find_every_page_that_was_altered_in_transit(
    place: Place, rng: random.Random
) -> None:
    found = altered_stream(place, 4, rng, checksums=True)
    assert found.unnoticed == 0, found
    assert found.noticed + found.harmless == 4


def test_without_checksums_an_altered_page_is_not_noticed(rng: random.Random) -> None:
    found = altered_stream("page", 2, rng)
    assert found.unnoticed == 2, found
