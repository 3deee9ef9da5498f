"""Transfers of models with state beside their KV cache, or with layers of different sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvxfer.connectors.sglang.incoming import Incoming
from kvxfer.connectors.sglang.outgoing import Outgoing
from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.errors import InvalidArgument, TransferCancelled
from kvxfer.prompt_digest import prompt_digest
from tests.connectors.sglang.hybrid_pools import (
    HYBRIDS,
    MAMBA,
    OTHER_V,
    PAGES_OF_PROMPT,
    SLIDING,
    Hybrid,
    expected,
)
from tests.connectors.sglang.instances import State, Two, ended, instance, two, until

pytestmark = pytest.mark.native

ROOM = Room(4711, prompt_digest([1, 2, 3]))
OURS, THEIRS = PAGES_OF_PROMPT


@contextlib.contextmanager
def both(hybrid: Hybrid, *, checksums: bool = False) -> Iterator[Two]:
    with two(
        states=hybrid.states,
        kv_page_bytes=hybrid.kv_page_bytes,
        mla=hybrid.mla,
        checksums=checksums,
    ) as sides:
        yield sides


def begin(sides: Two, hybrid: Hybrid) -> tuple[Outgoing, Incoming]:
    sender, receiver = sides.prefill.outgoing(), sides.incoming()
    receiver.receive(ROOM, THEIRS, 3, hybrid.target)
    sender.begin(ROOM, len(OURS))
    until(lambda: sender.progress is not Progress.BOOTSTRAPPING)
    assert sender.progress is Progress.WAITING, (sender.error, receiver.error)
    return sender, receiver


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("chunks", [[5], [2, 2, 1]])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_pages_and_state_arrive_chunk_by_chunk(
    kind: str, chunks: list[int], checksums: bool
) -> None:
    hybrid = HYBRIDS[kind]
    with both(hybrid, checksums=checksums) as sides:
        sender, receiver = begin(sides, hybrid)
        sent = 0
        for chunk in chunks:
            pages, sent = OURS[sent : sent + chunk], sent + chunk
            sender.send(pages, 1, hybrid.source if sent == len(OURS) else None)
        ended(sender, receiver)
        assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS), (
            sender.error,
            receiver.error,
        )
        moved = 0
        wanted = expected(hybrid)
        for ours, theirs, items in zip(sides.prefill.pool, sides.decode.pool, wanted, strict=True):
            for item, there in enumerate(theirs):
                if item in items:
                    assert (there == ours[items[item]]).all()
                    moved += there.nbytes
                else:
                    assert not there.any(), f"item {item} is not one of the request"
        assert sender.nbytes == moved
        assert (sides.decode.rows[0][3] == sides.prefill.rows[0][1]).all()


def test_state_is_sent_only_with_the_last_chunk() -> None:
    """SGLang computes with the state until then."""
    with both(MAMBA) as sides:
        sender, receiver = begin(sides, MAMBA)
        sender.send(OURS, 1)
        of_state = len(MAMBA.kv_page_bytes)
        kv = list(zip(sides.prefill.pool, sides.decode.pool, strict=True))[:of_state]
        until(lambda: all((a[OURS] == b[THEIRS]).all() for a, b in kv))
        assert not any(theirs.any() for theirs in sides.decode.pool[of_state:])
        assert sender.progress is Progress.TRANSFERRING
        for state in sides.prefill.pool[of_state:]:
            state[2] = 7
        sender.send([], 1, MAMBA.source)
        ended(sender, receiver)
        assert receiver.progress is Progress.SUCCESS, receiver.error
        assert all((theirs[4] == 7).all() for theirs in sides.decode.pool[of_state:])


@pytest.mark.parametrize("kind", ["sliding", "mamba", "sparse"])
@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_an_abort_between_two_chunks_leaves_the_state_alone(kind: str, by: str) -> None:
    hybrid = HYBRIDS[kind]
    with both(hybrid) as sides:
        sender, receiver = begin(sides, hybrid)
        sender.send(OURS[:3], 1)
        (sender if by == "prefill" else receiver).abort("the client has left")
        ended(sender, receiver)
        assert isinstance(sender.error, TransferCancelled)
        assert isinstance(receiver.error, TransferCancelled)
        sender.send(OURS[3:], 1, hybrid.source)
        assert not any(one.any() for one in sides.decode.pool[len(hybrid.kv_page_bytes) :])
        again = Room(4712, ROOM.prompt)
        sender, receiver = sides.prefill.outgoing(), sides.incoming()
        receiver.receive(again, THEIRS, 3, hybrid.target)
        sender.begin(again, len(OURS))
        until(lambda: sender.progress is Progress.WAITING)
        sender.send(OURS, 1, hybrid.source)
        ended(sender, receiver)
        assert receiver.progress is Progress.SUCCESS, receiver.error


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ((State("mamba", 5, (96, 96, 96, 320, 320, 320)),), "mamba 3x96 3x320"),
        ((State("mamba", 5, (96, 96, 640, 640)),), "mamba 2x96 2x640"),
        ((State("qsa_pending", 5, (96, 96, 96, 640, 640, 640)),), "qsa_pending 3x96 3x640"),
        ((), "'' here"),
    ],
)
def test_another_state_on_the_other_side_is_refused_by_name(
    other: tuple[State, ...], says: str
) -> None:
    with both(MAMBA) as sides, instance("other", states=other) as decode:
        receiver = decode.incoming(sides.introductions, sides.address)
        receiver.receive(ROOM, THEIRS, 3, [*MAMBA.target][: len(other)])
        ended(receiver)
        assert isinstance(receiver.error, InvalidArgument)
        assert "'kv 6x512, mamba 3x96 3x640' on prefill 'prefill'" in str(receiver.error)
        assert says in str(receiver.error)


def test_other_sizes_of_v_on_the_other_side_are_refused_by_name() -> None:
    with both(OTHER_V) as sides, instance("other", kv_page_bytes=(768, 512) * 3) as decode:
        receiver = decode.incoming(sides.introductions, sides.address)
        receiver.receive(ROOM, THEIRS, 3)
        ended(receiver)
        assert "'kv 3x768 3x512' on prefill" in str(receiver.error)


def test_a_window_that_prefill_does_not_have_is_refused_by_name() -> None:
    with both(SLIDING) as sides:
        sender, receiver = begin(sides, SLIDING)
        sender.send(OURS, 1, [SLIDING.source[0][1:]])
        ended(sender, receiver)
        assert "room for block 3 of the prompt, which prefill does not have" in str(receiver.error)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (None, "0 items of swa state for a prompt of 5 pages"),
        ([None], "0 items of swa state"),
        ([[]], "0 items of swa state"),
        ([[0, 1, 2, 3, 4, 5]], "6 items of swa state for a prompt of 5 pages"),
        ([[6]], "item 6 of SGLang's swa buffers, which have 6"),
    ],
)
def test_the_error_names_items_that_the_pool_does_not_have(
    states: list[list[int]], says: str
) -> None:
    with both(SLIDING) as sides:
        receiver = sides.incoming()
        receiver.receive(ROOM, THEIRS, 3, states)
        assert receiver.progress is Progress.FAILED
        assert says in str(receiver.error)


def test_prefill_that_hands_over_wrong_state_fails_on_both_sides() -> None:
    with both(MAMBA) as sides:
        sender, receiver = begin(sides, MAMBA)
        sender.send(OURS, 1, [[1, 2]])
        ended(sender, receiver)
        assert "2 items of mamba state" in str(receiver.error)
        assert not any(one.any() for one in sides.decode.pool[len(MAMBA.kv_page_bytes) :])
