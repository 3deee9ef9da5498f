"""What rank 0 tells the other ranks to do, and what they answer. One process tree, so it is
pickled."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvxfer.weights.transfer.staged import Staged


class Meet(NamedTuple):
    """All ranks have loaded: make the collective."""


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
    """Whether or not this rank has pinned."""


class Apply(NamedTuple):
    staged: Staged


class Applied(NamedTuple):
    """All ranks have."""

    staged: Staged


Command: TypeAlias = Meet | Prefill | Decode | Pin | Unpin | Apply | Applied


class Beat(NamedTuple):
    """The process lives."""


class Done(NamedTuple):
    """What `Meet`, `Pin`, `Unpin`, `Apply` or `Applied` told is done; and once, the rank has
    loaded."""

    staged: Staged | None = None
    address: str = ""
    """Of what has staged it; with the answer to `Meet`."""


class Refused(NamedTuple):
    """`Pin`: nothing has changed."""

    reason: str


class Failed(NamedTuple):
    """The process ends."""

    reason: str


Answer: TypeAlias = Beat | Done | Refused | Failed
