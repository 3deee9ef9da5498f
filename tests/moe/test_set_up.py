"""The set-up of groups, all ranks in one process, each in a thread, with real engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import DeadlineExceeded, InvalidArgument, KvxferError
from kvxfer.moe.all_to_all import AllToAll
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from verify.processes.programs import free_port

pytestmark = pytest.mark.native

KEY = "k" * 32
SHAPE: dict[str, Any] = {"experts": 6, "hidden": 32, "top_k": 2, "max_tokens": 4}


class Gather:
    """A stand-in for all_gather_object(), among threads."""

    def __init__(self, ranks: int) -> None:
        self._said = [""] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> Callable[[str], Sequence[str]]:
        def exchange(said: str) -> list[str]:
            self._said[rank] = said
            self._barrier.wait()
            return [*self._said]

        return exchange


def together(ranks: int, made: Callable[[int], AllToAll]) -> list[AllToAll | KvxferError]:
    """Sets up all ranks at once; returns each rank's group, or its error."""

    def of(rank: int) -> AllToAll | KvxferError:
        try:
            return made(rank)
        except KvxferError as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))


def close(groups: list[AllToAll | KvxferError]) -> None:
    whole = [group for group in groups if isinstance(group, AllToAll)]
    assert len(whole) == len(groups), groups
    with ThreadPoolExecutor(len(whole)) as threads:
        list(threads.map(AllToAll.close, whole))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 64}, "hidden is {} at rank {} and {} at rank {}"),
        ({"max_tokens": 8}, "max_tokens is {} at rank {} and {} at rank {}"),
        ({"input": "float32"}, "input is {} at rank {} and {} at rank {}"),
        ({"copies": 2}, "were given different placements"),
    ],
    ids=["hidden", "max_tokens", "input", "placement"],
)
def test_a_rank_that_differs_is_refused_by_name_on_all_sides(
    fabric: str, changes: dict[str, Any], said: str
) -> None:
    gather = Gather(3)

    def made(rank: int) -> AllToAll:
        mine = {**SHAPE, **(changes if rank == 1 else {})}
        copies = mine.pop("copies", 1)
        return AllToAll(
            MoeShape(**mine),
            rank=rank,
            ranks=3,
            cluster_key=KEY,
            exchange=gather.of(rank),
            placement=Placement.even(6, 3, copies),
            fabrics=[fabric],
        )

    errors = together(3, made)
    assert [type(error) for error in errors] == [InvalidArgument] * 3
    words = said.split(" {}")[0]
    assert all(words in str(error) for error in errors), errors
    assert "rank 1" in str(errors[0]) or "ranks 1" in str(errors[0]) or "and 1" in str(errors[0])


def test_the_error_names_a_rank_that_does_not_connect() -> None:
    """The addresses are given, not exchanged."""
    ports = [free_port() for _ in range(3)]
    addresses = [f"kvx://127.0.0.1:{port}/{'0' * 32}" for port in ports]

    def made(rank: int) -> AllToAll:
        return AllToAll(
            MoeShape(**SHAPE),
            rank=rank,
            ranks=3,
            cluster_key=KEY,
            addresses=addresses,
            port=ports[rank],
            timeout=0.5,
        )

    errors = together(2, made)
    assert [type(error) for error in errors] == [DeadlineExceeded] * 2
    assert all("ranks [2] have not connected" in str(error) for error in errors), errors


def test_ranks_meet_by_addresses_that_are_known_beforehand(fabric: str) -> None:
    ports = [free_port() for _ in range(3)]
    addresses = [f"kvx://127.0.0.1:{port}/{'0' * 32}" for port in ports]

    def made(rank: int) -> AllToAll:
        return AllToAll(
            MoeShape(**SHAPE),
            rank=rank,
            ranks=3,
            cluster_key=KEY,
            addresses=addresses,
            port=ports[rank],
            fabrics=[fabric],
        )

    close(together(3, made))


def test_another_cluster_key_is_refused() -> None:
    gather = Gather(2)

    def made(rank: int) -> AllToAll:
        key = KEY if rank == 0 else "another key, as long as it has to be"
        shape = MoeShape(**SHAPE)
        exchange = gather.of(rank)
        return AllToAll(shape, rank=rank, ranks=2, cluster_key=key, exchange=exchange, timeout=2)

    first, second = together(2, made)
    assert isinstance(second, KvxferError)
    assert second.code == "authentication-failed"
    assert isinstance(first, DeadlineExceeded)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_newcomer_in_the_place_of_a_live_rank_is_refused(fabric: str, rank: int) -> None:
    """Fails as soon as the members would have noticed a loss, long before the newcomer's
    timeout."""
    gather = Gather(2)
    options: dict[str, Any] = {"ranks": 2, "cluster_key": KEY, "torch": False, "fabrics": [fabric]}
    shape, ended = MoeShape(**SHAPE), threading.Event()

    def made(rank: int) -> AllToAll:
        return AllToAll(shape, rank=rank, exchange=gather.of(rank), **options)

    def steps(group: AllToAll) -> tuple[int, ...]:
        x, last = np.zeros((1, 32), np.uint16), False
        while not last:
            last = ended.is_set() and group.rank == 0
            # Rank 0 tells rank 1 of the last step, by a second token.
            rows = 2 if last else 1
            group.dispatch_send(x.repeat(rows, 0), *router(rows))
            got = group.dispatch_recv()
            last = last or (group.rank == 1 and got.source_rows[0] == 2)
            group.combine_send(got.x.copy())
            group.combine_recv()
        return group.members

    groups = together(2, made)
    assert isinstance(groups[0], AllToAll)
    address = groups[0].address
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(steps, group) for group in groups]  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=f"rank {rank} is not let in: its place is taken"):
            AllToAll(shape, rank=rank, member=address, timeout=3600, **options)
        ended.set()
        assert [each.result() for each in running] == [(0, 1)] * 2
    close(groups)


def test_the_error_of_a_newcomer_says_that_no_member_is_in_a_call() -> None:
    [group] = together(1, lone)
    assert isinstance(group, AllToAll)
    with group, pytest.raises(DeadlineExceeded, match=r"was not let in by kvx.*: it calls no step"):
        AllToAll(
            MoeShape(**SHAPE),
            rank=0,
            ranks=1,
            cluster_key=KEY,
            member=group.address,
            timeout=0.3,
            torch=False,
        )


def test_the_error_names_a_rank_that_does_not_run_the_step(fabric: str) -> None:
    gather = Gather(2)

    def made(rank: int) -> AllToAll:
        return AllToAll(
            MoeShape(**SHAPE),
            rank=rank,
            ranks=2,
            cluster_key=KEY,
            exchange=gather.of(rank),
            timeout=0.5,
            torch=False,
            fabrics=[fabric],
        )

    groups = together(2, made)
    first = groups[0]
    assert isinstance(first, AllToAll)
    x = np.zeros((1, 32), np.uint16)
    first.dispatch_send(x, np.array([[0, 5]]), np.ones((1, 2), np.float32))
    with pytest.raises(DeadlineExceeded, match=r"no tokens of ranks \[1\]"):
        first.dispatch_recv()
    close(groups)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group, x: group.dispatch_send(x, x, x), r"ids is uint16 \[1, 32\]"),
        (lambda group, x: group.dispatch_send(None, *router(1)), "x is a NoneType"),
        (lambda group, x: group.dispatch_send(x, [[0], [0, 1]], router(1)[1]), "ids is not an"),
        (lambda group, x: group.dispatch_send(x[:, :8], *router(1)), "x is"),
        (lambda group, x: group.dispatch_send(x, *router(1, 6)), "6"),
        (lambda group, x: group.dispatch_send(x, *router(1), slot=2), "slot is 2"),
        (lambda group, x: group.dispatch_send(x, *router(1), slot="a"), "slot is 'a'"),
        (lambda group, x: group.input(9), "slot is 9"),
        (lambda group, x: group.dispatch_send(x.repeat(5, 0), *router(5)), "5"),
    ],
)
def test_an_invalid_call_is_refused(call: Callable[[AllToAll, Any], object], said: str) -> None:
    [group] = together(1, lone)
    assert isinstance(group, AllToAll)
    with group, pytest.raises(InvalidArgument, match=said):
        call(group, np.zeros((1, 32), np.uint16))


def lone(rank: int) -> AllToAll:
    shape = MoeShape(**SHAPE)
    return AllToAll(shape, rank=0, ranks=1, cluster_key=KEY, exchange=lambda at: [at], torch=False)


def router(tokens: int, expert: int = 5) -> tuple[Any, Any]:
    return np.array([[0, expert]] * tokens), np.ones((tokens, 2), np.float32)


def test_a_capacity_that_is_too_small_is_refused_and_may_be_raised() -> None:
    [group] = together(1, lone)
    assert isinstance(group, AllToAll)
    with group:
        group.dispatch_send(np.zeros((3, 32), np.uint16), *router(3))
        with pytest.raises(InvalidArgument, match="local expert 0 has 3 rows, but capacity is 2"):
            group.dispatch_recv(layout="padded", capacity=2)
        got = group.dispatch_recv(layout="padded", capacity=3)
        assert got.x.shape == (6, 3, 32)
        group.combine_send(got.x)
        assert group.combine_recv().contributed.all()


def test_memory_is_reported_by_part() -> None:
    [group] = together(1, lone)
    assert isinstance(group, AllToAll)
    with group:
        assert sum(group.memory.values()) > 0
