"""The commands of rank 0 to the other ranks, and their answers. They are pickled, as all processes
belong to one tree."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvxfer.weights.transfer.staged import Staged


class Meet(NamedTuple):
    """The command to make the collective: all ranks have loaded."""


class Prefill(NamedTuple):
    tokens: list[int]
    blocks: list[int]


class Decode(NamedTuple):
    token: int
    position: int
    blocks: list[int]


class Pin(NamedTuple):
    update_id: str


class Unpin(NamedTuple):
    """The command to release what is pinned, if anything is."""


class Apply(NamedTuple):
    staged: Staged


class Applied(NamedTuple):
    """The command to report the update to its sender: all ranks have applied it."""

    staged: Staged


Command: TypeAlias = Meet | Prefill | Decode | Pin | Unpin | Apply | Applied


class Beat(NamedTuple):
    """The sign that the process lives."""


class Done(NamedTuple):
    """The answer that `Meet`, `Pin`, `Unpin`, `Apply` or `Applied` is done; and once, without a
    command, that the rank has loaded."""

    staged: Staged | None = None
    address: str = ""
    """The address of the rank's engine for weight updates, in the answer to `Meet`."""


class Refused(NamedTuple):
    """The refusal of `Pin`: nothing has changed."""

    reason: str


class Failed(NamedTuple):
    """The failure with which the process ends."""

    reason: str


Answer: TypeAlias = Beat | Done | Refused | Failed
