"""Settings out of the bounds in their annotations are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds, members

if TYPE_CHECKING:
    from kvxfer.nowhere import Secret  # type: ignore[import-not-found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Things:
    secret: Secret | None = None
    count: Annotated[int, Meta(ge=1, le=64)] = 4
    threads: Annotated[int, Meta(ge=1)] | None = None
    seconds: Seconds = 1.0
    part: Annotated[float, Meta(lt=1)] = 0.5
    side: Literal["left", "right"] = "left"

    def __post_init__(self) -> None:
        check_bounds(self)


def test_values_within_the_bounds_are_accepted() -> None:
    Things()
    Things(count=64, threads=1, seconds=1e-9, side="right")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": 0}, "count is 0; use 1 or more"),
        ({"count": 65}, "count is 65; use 64 or less"),
        ({"threads": 0}, "threads is 0; use 1 or more"),
        ({"seconds": 0.0}, "seconds is 0.0; use more than 0"),
        ({"seconds": float("nan")}, "seconds is nan; use more than 0"),
        ({"part": 1.0}, "part is 1.0; use less than 1"),
        ({"side": "both"}, "side is both; use left or right"),
    ],
)
def test_values_out_of_bounds_are_refused_with_name_value_and_remedy(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Things(**given)
    assert str(refused.value) == told


def test_member_types_have_no_metadata_and_no_types_only_for_checkers() -> None:
    found = members(Things)
    assert {name: member.type for name, member in found.items()} == {
        "count": int,
        "threads": int | None,
        "seconds": float,
        "part": float,
        "side": Literal["left", "right"],
    }
    assert list(found["count"].bounds()) == [("ge", 1), ("le", 64)]
