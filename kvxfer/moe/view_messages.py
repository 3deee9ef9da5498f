"""The messages between the ranks of a group about views (membership.py)."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.moe.shape import MOST_RANKS

Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks: TypeAlias = Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]
"""Ranks in ascending order."""
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 24)]
"""The number of a view: round * ranks + the rank that decided it. No two decisions share one."""
Step: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
MOST_WHY: Final = 500
Why: TypeAlias = Annotated[str, Meta(max_length=MOST_WHY)]
MOST_REFUSALS: Final = 64
"""The most refused steps that are ahead of some rank; further ones are not reported."""


class Refusal(msgspec.Struct, frozen=True):
    """A step that no rank runs, and the reason why `rank` could not begin it."""

    step: Step
    rank: Rank
    why: Why


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """member → members: no step begins and no dispatch completes here before the next view.

    next_step: the first step that the rank has not dispatched. lost: members that it has lost, or
    takes for lost. closed: those of them whose connection ended. judged: those that lost against a
    member that had accused them. The rest fell silent. ready: newcomers that it is set up with.
    refuses: why the rank cannot begin `next_step`; empty if it can.
    """

    view: Number
    next_step: Step
    lost: Ranks
    closed: Ranks = ()
    ready: Ranks = ()
    judged: Ranks = ()
    refuses: Why = ""


class View(msgspec.Struct, frozen=True, tag="view"):
    """leader → members: the view after `previous`. Members that have it send it to newcomers.

    first_step: the first step that is run in it, also by newcomers. refused: steps from that one on
    that are left out, one refusal each.
    """

    number: Number
    previous: Number
    members: Ranks
    newcomers: Ranks
    first_step: Step
    refused: Annotated[tuple[Refusal, ...], Meta(max_length=MOST_RANKS + MOST_REFUSALS)] = ()


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """leader → a rank that it has lost: are you alive? `survivors` of `view` would continue."""

    rank: Rank
    view: Number
    survivors: Ranks


class Excluded(msgspec.Struct, frozen=True, tag="excluded"):
    """The answer of a rank that has a later view, without the asker."""

    view: Number


class Yield(msgspec.Struct, frozen=True, tag="yield"):
    """The answer of a rank that is excluded from now on."""

    view: Number


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """The answer of a rank whose side is stronger than the asker's: ask again."""

    view: Number


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A notice to ranks without a next view: the code of the error with which they end."""

    view: Number
    code: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """newcomer → all ranks that it is set up with: `welcomed` are these ranks."""

    welcomed: Ranks


Message: TypeAlias = Flush | View | Ended | Ready
"""Messages over the connection of a pair."""
Answer: TypeAlias = Excluded | Yield | Wait
