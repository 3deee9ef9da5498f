"""The rule by which `make chaos SUITE=overload` judges a fleet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from verify.chaos.overload.__main__ import Outcome, Tenant

HELD = Outcome(
    seconds=300.0,
    capacity=10.0,
    goodput=9.5,
    tenants={"calm": Tenant(3000, 1400, 1600, 4.0), "loud": Tenant(6000, 1450, 4550, 4.2)},
    refused_seconds=(0.02, 0.09),
    failures={},
    expired_leases=0,
    open_transfers=0,
    holders=0,
)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({}, None),
        ({"goodput": 8.9}, "goodput was 0.89 of the capacity"),
        ({"tenants": {**HELD.tenants, "loud": Tenant(1, 1, 0, 4.5)}}, "took 4.00 and 4.50 s"),
        ({"refused_seconds": (0.02, 0.11)}, "a refusal took up to 110 ms"),
        ({"failures": {"502: gone": 3}}, "3 x 502: gone"),
        ({"expired_leases": 1}, "1 leases were lost"),
        ({"open_transfers": 2}, "left: 2 reservations"),
        ({"holders": 1}, "KV blocks of 1 servers"),
    ],
)
def test_each_broken_promise_is_reported(members: dict[str, Any], words: str | None):
    said = list(msgspec.structs.replace(HELD, **members).broken())
    assert len(said) == (words is not None)
    assert words is None or words in said[0]
