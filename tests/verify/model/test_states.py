"""The tables of the model are those of the code, so neither changes without the other."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import get_args

import pytest

from kvxfer.kv import messages
from kvxfer.kv.block_pool import TRANSITIONS, BlockState
from kvxfer.kv.session_state import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
)
from verify.model.checks import CHECKS, LARGE, MUTATIONS
from verify.model.verifier import MODELS

STATES = (MODELS / "states.pml").read_text()

# The model has a flag of the connection for HELLO, and no brokered handshake with EXPECT.
NOT_IN_THE_MODEL = {"HELLO", "EXPECT"}


def names(kind: str) -> list[str]:
    """Returns the names of an mtype, as the code writes them."""
    found = re.search(rf"mtype:{kind} = \{{(.*?)\}}", STATES, re.DOTALL)
    assert found, f"states.pml has no mtype:{kind}"
    listed = (name.strip() for name in found[1].split(","))
    return [re.sub(r"^(PE|DE|P|D)_", "", name) for name in listed]


def table(macro: str) -> set[tuple[str, ...]]:
    """Returns the lines of a table: from, event, to."""
    lines = re.findall(rf"^ +{macro}\((.*)\)$", STATES, re.MULTILINE)
    rows = [tuple(name.strip() for name in line.split(",")) for line in lines]
    assert len(rows) == len(set(rows)), f"{macro} has a line twice"
    return set(rows)


def members(kind: Iterable[enum.Enum]) -> list[str]:
    return [member.name for member in kind]


@pytest.mark.parametrize(
    ("kind", "in_the_code"),
    [
        ("prefill", ["NONE", *members(PrefillState)]),
        ("decode", ["NONE", *members(DecodeState)]),
        ("prefill_event", members(PrefillEvent)),
        ("decode_event", members(DecodeEvent)),
        ("block", members(BlockState)),
    ],
)
def test_names_are_those_of_the_code(kind: str, in_the_code: list[str]) -> None:
    assert names(kind) == in_the_code


def test_messages_are_those_of_the_code() -> None:
    tags = {str(kind.__struct_config__.tag).upper() for kind in get_args(messages.Message)}
    assert set(names("message")) == tags - NOT_IN_THE_MODEL
    assert tags >= NOT_IN_THE_MODEL


def test_transitions_are_those_of_the_code() -> None:
    assert table("PREFILL") == {
        (before.name, event.name, after.name)
        for (before, event), after in PREFILL_TRANSITIONS.items()
    }
    assert table("DECODE") == {
        (before.name, event.name, after.name)
        for (before, event), after in DECODE_TRANSITIONS.items()
    }
    assert table("BLOCK") == {
        (before.name, after.name)
        for before, following in TRANSITIONS.items()
        for after in following
    }


def test_every_switch_of_a_check_is_in_the_model() -> None:
    text = "\n".join(path.read_text() for path in sorted(MODELS.glob("*.pml")))
    for check in (*CHECKS, *LARGE, *MUTATIONS):
        for name, value in check.defines.items():
            pattern = rf"#ifn?def {name}\b|defined\({name}\)" if value is None else rf"\b{name}\b"
            assert re.search(pattern, text), f"{check.name}: {name}"


def test_every_invariant_is_violated_by_a_mutation() -> None:
    refuted = {check.refuted for check in MUTATIONS}
    assert refuted == {f"invariant {number}" for number in range(1, 7)}
