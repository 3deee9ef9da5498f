"""The order of the calls of a group: each in each wrong state, and all after close()."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from kvxfer.errors import EngineClosed, InvalidArgument
from kvxfer.moe import AllToAll
from tests.moe.test_set_up import lone, router, together

pytestmark = pytest.mark.native

STEP: Final = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
X: Final = np.zeros((1, 32), np.uint16)
CALLS: Final[dict[str, Callable[[AllToAll, int], Any]]] = {
    "dispatch_send": lambda group, slot: group.dispatch_send(X, *router(1), slot=slot),
    "dispatch_recv": lambda group, slot: group.dispatch_recv(slot=slot),
    "combine_send": lambda group, slot: group.combine_send(np.zeros((2, 32), np.uint16), slot=slot),
    "combine_recv": lambda group, slot: group.combine_recv(slot=slot),
}


@pytest.fixture
def group() -> Iterator[AllToAll]:
    [made] = together(1, lone)
    assert isinstance(made, AllToAll)
    yield made
    made.close()


def run(group: AllToAll, calls: int, slot: int = 0) -> None:
    for name in STEP[:calls]:
        CALLS[name](group, slot)


@pytest.mark.parametrize(
    ("done", "wrong"),
    [
        (done, wrong)
        for done, wrong in itertools.product(range(len(STEP)), STEP)
        if wrong != STEP[done]
    ],
)
def test_the_error_of_a_call_out_of_order_names_it_and_the_next_one(
    group: AllToAll, done: int, wrong: str
) -> None:
    run(group, done)
    with pytest.raises(InvalidArgument) as raised:
        CALLS[wrong](group, 0)
    words = re.findall(r"(\w+)\(\)", str(raised.value))
    assert words == [wrong, STEP[done]]
    assert "in slot 0" in str(raised.value)
    assert not re.search("wait|place|arriv", str(raised.value))
    for name in STEP[done:]:  # nothing has changed
        CALLS[name](group, 0)
    run(group, 2, slot=1)


@pytest.mark.parametrize("done", range(len(STEP)))
@pytest.mark.parametrize("call", [*STEP, "input", "answers", "__enter__"])
def test_a_closed_group_says_so_in_every_call(group: AllToAll, call: str, done: int) -> None:
    run(group, done)
    group.close()
    group.close()
    calls = {
        **CALLS,
        "input": lambda group, slot: group.input(slot),
        "answers": lambda group, slot: group.answers(slot),
        "__enter__": lambda group, slot: group.__enter__(),
    }
    with pytest.raises(EngineClosed, match="the group of rank 0 was closed"):
        calls[call](group, 0)


def test_a_group_that_an_error_has_left_is_closed(group: AllToAll) -> None:
    with pytest.raises(ZeroDivisionError), group:
        1 // 0  # noqa: B018
    with pytest.raises(EngineClosed, match="was closed"):
        CALLS["dispatch_send"](group, 0)
