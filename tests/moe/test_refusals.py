"""Steps that a rank refuses: the errors of all ranks, and how they go on. All in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest

from kvxfer.errors import DeadlineExceeded, InvalidArgument, KvxferError, StepRefused
from kvxfer.moe import AllToAll, MoeShape
from tests.moe.test_set_up import KEY, Gather, close, together

pytestmark = pytest.mark.native

RANKS: Final = 3
SHAPE: Final = MoeShape(experts=6, hidden=32, top_k=2, max_tokens=4, input="float32")
IDS: Final = np.array([[0, 5], [2, 3]])
WEIGHTS: Final = np.ones((2, 2), np.float32)
X: Final = np.arange(64, dtype=np.float32).reshape(2, 32)


@pytest.fixture
def groups(fabric: str) -> Iterator[list[AllToAll]]:
    groups = form(fabric)
    yield groups
    close(groups)  # type: ignore[arg-type]


def form(fabric: str, timeout: float = 30.0) -> list[AllToAll]:
    gather = Gather(RANKS)

    def made(rank: int) -> AllToAll:
        return AllToAll(
            SHAPE,
            rank=rank,
            ranks=RANKS,
            cluster_key=KEY,
            exchange=gather.of(rank),
            torch=False,
            timeout=timeout,
            fabrics=[fabric] if fabric == "tcp" else ["local", "tcp"],
        )

    groups = together(RANKS, made)
    assert all(isinstance(group, AllToAll) for group in groups), groups
    return groups  # type: ignore[return-value]


def on_each(groups: list[AllToAll], run: Callable[[AllToAll], Any]) -> list[Any]:
    """Runs a function at each rank; returns its results, or kvxfer's errors."""

    def of(group: AllToAll) -> Any:
        try:
            return run(group)
        except KvxferError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(of, groups))


def begin(group: AllToAll, slot: int = 0) -> int:
    return group.dispatch_send(X + group.rank, IDS, WEIGHTS, slot=slot)


def end(group: AllToAll, slot: int = 0) -> bool:
    """Ends a step in which experts that change nothing return each token twice; True if they
    did."""
    got = group.dispatch_recv(slot=slot)
    group.combine_send(got.x.copy(), slot=slot)
    combined = group.combine_recv(slot=slot)
    assert combined.missing == ()
    assert combined.contributed.all()
    return bool(np.array_equal(combined.out, 2 * (X + group.rank)))


def step(group: AllToAll) -> bool:
    begin(group)
    return end(group)


BAD: Final[dict[str, tuple[tuple[Any, Any, Any], str]]] = {
    "an id too high": ((X, np.array([[0, 5], [2, 6]]), WEIGHTS), "token 1, choice 1: expert 6"),
    "an id too low": ((X, np.array([[0, -2], [2, 3]]), WEIGHTS), "token 0, choice 1: expert -2"),
    "ids of floats": ((X, WEIGHTS, WEIGHTS), "ids is float32"),
    "ids of texts": ((X, np.array([["0", "5"], ["2", "3"]]), WEIGHTS), "ids is str"),
    "ids of another shape": ((X, IDS[:1], WEIGHTS), r"ids is int64 \[1, 2\]"),
    "weights of another shape": ((X, IDS, WEIGHTS[:, :1]), r"weights is float32 \[2, 1\]"),
    "x of another dtype": ((X.astype(np.float64), IDS, WEIGHTS), "x is float64"),
    "x of another width": ((X[:, :16].copy(), IDS, WEIGHTS), r"x is float32 \[2, 16\]"),
    "x that is none": ((None, IDS, WEIGHTS), "x is a NoneType"),
    "too many tokens": (
        (X.repeat(3, 0), IDS.repeat(3, 0), WEIGHTS.repeat(3, 0)),
        "6 tokens; max_tokens is 4",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_one_rank_refuses_fails_at_all_with_its_reason(
    groups: list[AllToAll], name: str
) -> None:
    arguments, why = BAD[name]
    assert on_each(groups, step) == [True] * RANKS

    def refused(group: AllToAll) -> object:
        return group.dispatch_send(*arguments) if group.rank == 1 else step(group)

    first, second, third = on_each(groups, refused)
    assert isinstance(second, InvalidArgument)
    for error in (first, third):
        assert isinstance(error, StepRefused)
        assert str(error) == f"rank 1 refused step 1: {second}"
    with pytest.raises(InvalidArgument, match=why):
        raise second
    assert {group.next_step for group in groups} == {2}
    assert on_each(groups, step) == [True] * RANKS
    assert {group.members for group in groups} == {(0, 1, 2)}


def test_all_ranks_may_refuse_one_step(groups: list[AllToAll]) -> None:
    errors = on_each(groups, lambda group: group.dispatch_send(X, IDS + 9, WEIGHTS))
    assert [type(error) for error in errors] == [InvalidArgument] * RANKS
    assert {group.next_step for group in groups} == {1}
    assert on_each(groups, step) == [True] * RANKS


def test_two_ranks_refuse_different_steps(groups: list[AllToAll]) -> None:
    def run(group: AllToAll) -> list[object]:
        found: list[object] = []
        for number in range(6):
            bad = 9 if (group.rank, number) in ((0, 1), (2, 2), (2, 3)) else 0
            try:
                group.dispatch_send(X + group.rank, IDS + bad, WEIGHTS)
                found.append(end(group))
            except (InvalidArgument, StepRefused) as error:
                found.append(type(error))
        return found

    refused, invalid = StepRefused, InvalidArgument
    assert on_each(groups, run) == [
        [True, invalid, refused, refused, True, True],
        [True, refused, refused, refused, True, True],
        [True, refused, invalid, invalid, True, True],
    ]


def test_the_step_in_the_other_slot_is_whole(groups: list[AllToAll]) -> None:
    """Two steps are under way, and the second is refused; then its slot takes the next one."""

    def run(group: AllToAll) -> list[object]:
        assert begin(group, slot=0) == 0
        if group.rank == 2:
            with pytest.raises(InvalidArgument):
                group.dispatch_send(X, IDS + 9, WEIGHTS, slot=1)
        else:
            assert begin(group, slot=1) == 1
        found: list[object] = [end(group, slot=0)]
        if group.rank != 2:
            with pytest.raises(StepRefused, match="rank 2 refused step 1"):
                end(group, slot=1)
        return [*found, begin(group, slot=1), end(group, slot=1)]

    assert on_each(groups, run) == [[True, 2, True]] * RANKS


def test_a_rank_may_refuse_a_step_while_the_others_close(groups: list[AllToAll]) -> None:
    assert on_each(groups, step) == [True] * RANKS

    def run(group: AllToAll) -> object:
        return group.dispatch_send(None, IDS, WEIGHTS) if group.rank == 1 else group.close()

    none, refused, also_none = on_each(groups, run)
    assert (none, also_none) == (None, None)
    assert isinstance(refused, InvalidArgument)
    assert groups[1].members == (1,)
    assert begin(groups[1]) == 2


def test_a_refusal_that_the_others_do_not_hear_in_time_holds_once_they_do(fabric: str) -> None:
    groups = form(fabric, timeout=0.5)
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1, 2\] do not agree") as raised:
        groups[0].dispatch_send(None, IDS, WEIGHTS)
    assert isinstance(raised.value.__context__, InvalidArgument)
    for group in groups:
        group.timeout = 30.0
    errors = on_each(groups, step)
    assert {str(error) for error in errors} == {
        "rank 0 refused step 0: x is a NoneType that has no rows"
    }
    assert on_each(groups, step) == [True] * RANKS
    close(groups)  # type: ignore[arg-type]


def test_a_call_out_of_order_refuses_no_step(groups: list[AllToAll]) -> None:
    def run(group: AllToAll) -> bool:
        begin(group)
        if group.rank == 0:
            with pytest.raises(InvalidArgument, match=r"dispatch_recv\(\) comes next"):
                group.dispatch_send(None, IDS, WEIGHTS)
            with pytest.raises(InvalidArgument, match="slot is 7"):
                group.dispatch_send(X, IDS, WEIGHTS, slot=7)
        return end(group)

    assert on_each(groups, run) == [True] * RANKS
    assert on_each(groups, step) == [True] * RANKS


def test_several_steps_in_turn_may_be_refused(groups: list[AllToAll]) -> None:
    found = on_each(groups, lambda group: [_refused(group) for _ in range(3)])
    assert found == [["InvalidArgument"] * 3, *[["StepRefused"] * 3] * 2]
    assert on_each(groups, step) == [True] * RANKS


def _refused(group: AllToAll) -> str:
    try:
        group.dispatch_send(X, IDS + (9 if group.rank == 0 else 0), WEIGHTS)
        end(group)
    except (InvalidArgument, StepRefused) as error:
        return type(error).__name__
    return ""
