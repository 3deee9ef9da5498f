"""What a rank has to do for the agreement on views (membership.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvxfer.errors import MoeGroupLost, RankExcluded
from kvxfer.moe.view_messages import Answer, Ask, Message, View


@dataclass(frozen=True, slots=True)
class Send:
    """To a rank by the connection of its pair; nothing where that has ended."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Fence:
    """End the connection to a rank: nothing of it counts any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class AskRank:
    """Connect to a rank anew and ask it; answered() tells how that went: with None, too, where a
    newcomer knows no address of it. `pause`: not at once, but after some milliseconds."""

    rank: int
    ask: Ask
    pause: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """To the rank that asks, by the connection on which it asked."""

    rank: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Adopt:
    """From now on this view; steps from `first_step` on that were dispatched are posted again."""

    view: View


@dataclass(frozen=True, slots=True)
class End:
    """The rank has no next view: RankExcluded or MoeGroupLost."""

    error: RankExcluded | MoeGroupLost


Effect: TypeAlias = Send | Fence | AskRank | Reply | Adopt | End
Effects: TypeAlias = tuple[Effect, ...]
