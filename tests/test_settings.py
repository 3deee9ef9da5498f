"""Settings out of the bounds in their annotations are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from msgspec import Meta

from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds, members, read_members

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
    name: Annotated[str, Meta(max_length=4)] | None = None
    turn: Literal["left"] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    count: Annotated[int, Meta(ge=1, le=64)] = 4
    threads: Annotated[int, Meta(ge=1)] | None = None
    part: Annotated[float, Meta(lt=1)] = 0.5
    names: Sequence[str] = ()
    on: bool = False


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
        ({"count": 2.0}, "count is 2.0; use a whole number"),
        ({"count": True}, "count is True; use a whole number"),
        ({"threads": "2"}, "threads is '2'; use a whole number"),
        ({"name": "n" * 5}, "name has a length of 5; use 4 or less"),
        ({"name": 5}, "name is 5; use text"),
        ({"turn": "up"}, "turn is 'up'; use left"),
        ({"side": None}, "side is None; use left or right"),
        ({"part": 1.0}, "part is 1.0; use less than 1"),
        ({"side": "both"}, "side is 'both'; use left or right"),
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
        "name": str | None,
        "turn": Literal["left"] | None,
    }
    assert found["count"].bounds == [("ge", 1), ("le", 64)]


def test_members_of_a_base_are_read_as_where_it_is_defined() -> None:
    assert "lease_seconds" in members(ConnectorSettings)


@pytest.mark.parametrize(
    ("given", "text", "value"),
    [
        ({"count": 2, "part": 0}, {"count": " 2", "part": "0"}, {"count": 2, "part": 0.0}),
        ({"names": ["a", "b"]}, {"names": "a, b,"}, {"names": ["a", "b"]}),
        ({"on": True}, {"on": "1"}, {"on": True}),
        ({"threads": None}, {"threads": ""}, {}),
    ],
)
def test_json_and_text_mean_the_same(
    given: dict[str, Any], text: dict[str, Any], value: dict[str, Any]
) -> None:
    assert read_members(Given, given, str) == read_members(Given, text, str, text=True) == value


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": "2"}, "--count is '2'; pass a whole number"),
        ({"count": 65}, "--count is 65; use 64 or less"),
        ({"names": ["a", 2]}, "--names is ['a', 2]; pass a list, each item text"),
        ({"on": 1}, "--on is 1; pass true or false"),
        ({"part": True}, "--part is True; pass a number"),
    ],
)
def test_a_setting_is_refused_by_the_name_that_the_operator_gave(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_members(Given, given, "--{}".format)
    assert str(refused.value) == told
