"""What the ranks of a group say to each other about views (membership.py)."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.moe.shape import MOST_RANKS

Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks: TypeAlias = Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]
"""In ascending order."""
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 24)]
"""Of a view: round * ranks + the rank that decided it. Two decisions never have one number."""
Step: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
MOST_WHY: Final = 500
Why: TypeAlias = Annotated[str, Meta(max_length=MOST_WHY)]
MOST_REFUSALS: Final = 64
"""That are ahead of some rank; further refusals are not told."""


class Refusal(msgspec.Struct, frozen=True):
    """A step that no rank runs, and why this one could not begin it."""

    step: Step
    rank: Rank
    why: Why


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """member → members: no step begins and no dispatch completes here before the next view.

    next_step: the first step that the rank has not dispatched. lost: members that it has lost, or
    takes for lost. closed: those of them whose connection ended. judged: those that lost against
    one that had accused them. The rest fell silent. ready: newcomers that it is set up with.
    refuses: why the rank cannot begin `next_step`; empty where it can.
    """

    view: Number
    next_step: Step
    lost: Ranks
    closed: Ranks = ()
    ready: Ranks = ()
    judged: Ranks = ()
    refuses: Why = ""


class View(msgspec.Struct, frozen=True, tag="view"):
    """leader → members: the view after `previous`; each that has it → newcomers.

    first_step: the first that is run in it, and that newcomers run. refused: steps from it on that
    are left out, one refusal each.
    """

    number: Number
    previous: Number
    members: Ranks
    newcomers: Ranks
    first_step: Step
    refused: Annotated[tuple[Refusal, ...], Meta(max_length=MOST_RANKS + MOST_REFUSALS)] = ()


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """leader → a rank that is lost to it: are you alive? Of view `view`, these go on."""

    rank: Rank
    view: Number
    survivors: Ranks


class Excluded(msgspec.Struct, frozen=True, tag="excluded"):
    """The answer of one that has a later view, without the asker."""

    view: Number


class Yield(msgspec.Struct, frozen=True, tag="yield"):
    """The answer of one that is excluded from now on."""

    view: Number


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """The answer of one whose side goes before the asker's: ask again."""

    view: Number


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """To ranks that have no next view: the code of the error that they end with."""

    view: Number
    code: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """newcomer → all that it is set up with: which ranks these are."""

    welcomed: Ranks


Message: TypeAlias = Flush | View | Ended | Ready
"""By the connection of a pair."""
Answer: TypeAlias = Excluded | Yield | Wait
