from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum

import pytest

from kvxfer.errors import ProtocolError
from kvxfer.kv.session_state import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
    StateMachine,
    why_left,
)

ENDS_PREFILL = {PrefillState.DELIVERED, PrefillState.CANCELLED}
ENDS_DECODE = {DecodeState.TAKEN, DecodeState.CANCELLED, DecodeState.FAILED}


def reachable(table: Mapping[tuple[StrEnum, StrEnum], StrEnum], start: StrEnum) -> set[StrEnum]:
    found, pending = {start}, [start]
    while pending:
        state = pending.pop()
        following = {after for (before, _), after in table.items() if before is state}
        pending += following - found
        found |= following
    return found


@pytest.mark.parametrize(
    ("table", "states", "events", "ends"),
    [
        (PREFILL_TRANSITIONS, PrefillState, PrefillEvent, ENDS_PREFILL),
        (DECODE_TRANSITIONS, DecodeState, DecodeEvent, ENDS_DECODE),
    ],
    ids=["prefill", "decode"],
)
def test_every_state_leads_to_an_end_and_ends_are_final(
    table: Mapping[tuple[StrEnum, StrEnum], StrEnum],
    states: type[StrEnum],
    events: type[StrEnum],
    ends: set[StrEnum],
) -> None:
    start = next(iter(states))
    assert reachable(table, start) == set(states)
    assert {event for _, event in table} == set(events)
    for state in states:
        if state in ends:
            assert not any(before is state for before, _ in table)
        else:
            assert reachable(table, state) & ends


@pytest.mark.parametrize(
    ("table", "ends", "always"),
    [
        (PREFILL_TRANSITIONS, ENDS_PREFILL, {PrefillEvent.ABORT, PrefillEvent.LEASE_OVER}),
        (
            DECODE_TRANSITIONS,
            ENDS_DECODE,
            {DecodeEvent.ABORT, DecodeEvent.LEASE_OVER, DecodeEvent.PEER_LOST},
        ),
    ],
    ids=["prefill", "decode"],
)
def test_nothing_waits_for_ever(
    table: Mapping[tuple[StrEnum, StrEnum], StrEnum], ends: set[StrEnum], always: set[StrEnum]
) -> None:
    for state in {before for before, _ in table} - ends:
        for event in always:
            assert (state, event) in table


def test_decode_starts_only_when_the_count_is_complete() -> None:
    into_complete = {
        (before, event)
        for (before, event), after in DECODE_TRANSITIONS.items()
        if after is DecodeState.COMPLETE and before is not after
    }
    assert into_complete == {(DecodeState.COUNTING, DecodeEvent.COUNTED)}
    into_taken = {before for (before, _), s in DECODE_TRANSITIONS.items() if s is DecodeState.TAKEN}
    assert into_taken == {DecodeState.COMPLETE}


def test_prefill_ends_only_when_nothing_is_under_way() -> None:
    into_ends = {event for (_, event), s in PREFILL_TRANSITIONS.items() if s in ENDS_PREFILL}
    assert into_ends == {PrefillEvent.DELIVERED, PrefillEvent.DRAINED}


def test_an_event_that_is_not_allowed_changes_nothing_and_is_named() -> None:
    machine = StateMachine("transfer t", DECODE_TRANSITIONS, DecodeState.OFFERED)
    assert not machine.allows(DecodeEvent.DONE)
    with pytest.raises(ProtocolError, match="transfer t is offered, where done is not allowed"):
        machine.advance(DecodeEvent.DONE)
    assert machine.state is DecodeState.OFFERED
    assert machine.advance(DecodeEvent.ACCEPTED) is DecodeState.RECEIVING


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "its session was left"),
        (asyncio.CancelledError(), "its request was cancelled"),
        (ValueError("no room"), "its session was left by ValueError: no room"),
    ],
)
def test_the_other_side_learns_why_a_session_was_left(
    error: BaseException | None, told: str
) -> None:
    assert why_left(error) == told
