"""The requests of `make test SUITE=openai`, and the differences that docs/router.md excuses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.compare.openai.answers import Where
from verify.compare.openai.cases import Case
from verify.compare.openai.excuses import Excuse, excusing, read_excuses
from verify.compare.openai.members import CHAT, COMPLETIONS, ROUTES, Values, members_of
from verify.compare.openai.pairs import PairCover

from .openai_answers import (
    MESSAGES,
    OF_USAGE,
    REFUSED,
)

# Excuses of docs/router.md.

TABLE: Final = """
| a | table |
|---|---|
| of | others |

| route | member | condition | part | aggregated server | router |
|---|---|---|---|---|---|
| all | `kv_transfer_params` | not null | all | ignored | 400 |
| `/v1/completions` | `n` | over 1 | `usage` | of one | of all |

| another | table |
|---|---|
| all | `seed` |

| all | `seed` | not null | all | of a third | table |
"""


def test_excuses_are_the_rows_of_the_table(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE)
    assert read_excuses(document) == [REFUSED, OF_USAGE]


def test_a_condition_that_is_unknown_is_named(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE.replace("over 1", "often"))
    with pytest.raises(ValueError, match=r"router\.md.*'often'.*over 1"):
        read_excuses(document)


def test_a_document_without_the_table_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE.replace("condition", "case"))
    with pytest.raises(ValueError):
        read_excuses(document)


def test_the_document_of_the_router_excuses_something() -> None:
    assert read_excuses()


@pytest.mark.parametrize(
    ("condition", "holds", "does_not"),
    [
        ("not null", ({}, 0, False, ""), (None,)),
        ("of no worker", ("", "none-such"), ("tiny", "blue", 7, None)),
        ("not fit for a log", ("", "two lines\n", "r" * 200), ("req-7", 7, None)),
        ("over 1", (2, 1.5), (1, 0, True, "2", None)),
    ],
)
def test_a_row_applies_to_values_that_meet_its_condition(
    condition: str, holds: tuple[Any, ...], does_not: tuple[Any, ...]
) -> None:
    excuse = Excuse("all", "a", condition, "all")
    assert [value for value in holds if not excuse.matches(CHAT, {"a": value})] == []
    assert [value for value in does_not if excuse.matches(CHAT, {"a": value})] == []


def test_a_row_applies_to_its_route_and_member() -> None:
    assert OF_USAGE.matches(COMPLETIONS, {"n": 2})
    assert not OF_USAGE.matches(CHAT, {"n": 2})
    assert not OF_USAGE.matches(COMPLETIONS, {"best_of": 2})
    assert not OF_USAGE.matches(COMPLETIONS, b'{"n": 2}')
    assert REFUSED.matches(MESSAGES, {"kv_transfer_params": {}})


def test_a_row_excuses_only_its_part() -> None:
    usage = Where(("usage", "cached_tokens"), "3, not 4")
    text = Where(("choices", "0", "text"), "'a', not 'b'")
    case = Case("n", COMPLETIONS, ({"n": 2},))

    def excused(*where: Where, **more: Any) -> Excuse | None:
        return excusing([REFUSED, OF_USAGE], case, {"n": 2, **more}, where)

    assert excused(usage) is OF_USAGE
    assert excused(usage, text) is None
    assert excused(text) is None
    assert excused(Where(("status",), "500, not 200")) is None
    assert excused(usage, text, kv_transfer_params={}) is REFUSED


def test_only_a_row_of_the_whole_answer_is_a_refusal() -> None:
    assert REFUSED.refuses(CHAT, {"kv_transfer_params": {}})
    assert not REFUSED.refuses(CHAT, {"kv_transfer_params": None})
    assert not OF_USAGE.refuses(COMPLETIONS, {"n": 2})


# Bodies of many members.

Takes = Callable[[Collection[str]], bool]


def bodies_until_covered(cover: PairCover, takes: Takes) -> list[Collection[str]]:
    """Returns the bodies sent to an engine until all pairs are covered; fails if there are too
    many."""
    asked: list[Collection[str]] = []
    while cover.left and len(asked) < 2 * cover.total:
        asked.append(cover.next())
        cover.told(asked[-1], answered=takes(asked[-1]))
    assert not cover.left
    return asked


@st.composite
def groups_that_are_refused(draw: st.DrawFn) -> tuple[list[str], set[tuple[str, ...]]]:
    """Draws members, and groups of two or three of them that no body may have together."""
    members = [f"m{index:02}" for index in range(draw(st.integers(2, 14)))]
    sizes = [list(itertools.combinations(members, size)) for size in (2, 3)]
    refused = {each for size in sizes if size for each in draw(st.sets(st.sampled_from(size)))}
    return members, refused


@given(groups_that_are_refused(), st.integers(0, 99))
def test_each_pair_is_answered_or_refused_as_by_the_engine(
    drawn: tuple[list[str], set[tuple[str, ...]]], seed: int
) -> None:
    members, groups = drawn
    cover = PairCover(members, random.Random(seed))
    bodies_until_covered(cover, lambda names: not any(set(group) <= set(names) for group in groups))
    refused = {group for group in groups if len(group) == 2}
    assert cover.refused == refused
    assert cover.answered == set(itertools.combinations(sorted(members), 2)) - refused


def test_pairs_that_are_all_valid_take_few_bodies(seed: int) -> None:
    cover = PairCover([f"m{index:02}" for index in range(24)], random.Random(seed))
    asked = bodies_until_covered(cover, lambda names: True)
    assert len(cover.answered) == cover.total == 24 * 23 // 2
    assert len(asked) <= 25


# Members from a document.


def openapi(**members: Any) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    return {
        "paths": {route: {"post": {"requestBody": {"content": body}}} for route in ROUTES},
        "components": {
            "schemas": {
                "Body": {"type": "object", "properties": members},
                "Mode": {"type": "string", "enum": ["fast", "slow", "exact"]},
                "Alias": {"$ref": "#/components/schemas/Mode"},
            }
        },
    }


def optional(**schema: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "boolean"}, Values(True, (False, None, "on", 1), ("maybe", [1]))),
        (
            {"type": "integer", "default": 4, "minimum": 1, "maximum": 9},
            Values(4, (1, 9, None), ("x", [1])),
        ),
        (optional(type="number", minimum=0), Values(1, (0, None), ("x", [1]))),
        ({"type": "string"}, Values("a", ("a", "", None), (7, ["a"]))),
        (
            {"type": "string", "enum": ["fast", "slow"]},
            Values("fast", ("slow", "", None), (7, ["a"])),
        ),
        (
            optional(**{"$ref": "#/components/schemas/Alias"}),
            Values("fast", ("exact", "", None), (7, ["a"])),
        ),
        (optional(type="array", items={}), Values([], (None,), ("x", 7))),
        ({"oneOf": [{"type": "array"}]}, Values([], (None,), ("x", 7))),
        ({}, Values({}, (None,), ("x", [1]))),
    ],
)
def test_a_new_member_gets_values_by_its_schema(schema: dict[str, Any], values: Values) -> None:
    assert members_of(openapi(unheard_of=schema), CHAT) == {"unheard_of": values}


def test_members_are_those_of_the_document_with_the_values_of_their_route() -> None:
    number = {"type": "integer"}
    document = openapi(logprobs=number, top_k=number)
    of_chat, of_completions = (members_of(document, route) for route in (CHAT, COMPLETIONS))
    assert list(of_chat) == list(of_completions) == ["logprobs", "top_k"]
    assert of_chat["top_k"].ordinary == of_completions["top_k"].ordinary == 5
    assert of_chat["logprobs"].ordinary is True
    assert of_completions["logprobs"].ordinary == 2
