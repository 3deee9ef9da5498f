from __future__ import annotations

import pytest

from kvxfer.scheduler.topology import distance, place_of

HERE = {"zone": "a", "rack": "r1", "host": "h1", "numa": "0"}


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        (HERE, HERE, 0),
        (HERE, {**HERE, "numa": "1"}, 1),
        (HERE, {**HERE, "host": "h2"}, 2),
        (HERE, {**HERE, "rack": "r2"}, 3),
        (HERE, {**HERE, "zone": "b"}, 4),
        # racks, hosts and nodes of one name in two places are two
        (HERE, {**HERE, "zone": "b", "host": "h1"}, 4),
        # other labels do not matter
        (HERE, {**HERE, "gpu": "h100"}, 0),
        # without labels everything is in one place
        ({}, {}, 0),
        # a label that only one of them has is another place
        ({"host": "h1"}, {"host": "h1"}, 0),
        ({"host": "h1"}, {"host": "h2"}, 2),
        ({"host": "h1"}, {}, 2),
        ({"zone": "a"}, {}, 4),
    ],
)
def test_distance(one, other, steps):
    assert distance(place_of(one), place_of(other)) == steps
    assert distance(place_of(other), place_of(one)) == steps
