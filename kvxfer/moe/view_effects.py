"""The actions of a rank for the agreement on views (membership.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvxfer.errors import MoeGroupLost, RankExcluded
from kvxfer.moe.view_messages import Answer, Ask, Message, View


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a rank over the connection of its pair; nothing if that has ended."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Fence:
    """The end of the connection to a rank: nothing from it counts afterwards."""

    rank: int


@dataclass(frozen=True, slots=True)
class AskRank:
    """A question to a rank over a new connection. answered() takes the answer, or None, also if a
    newcomer knows no address of the rank. `pause`: not at once, but after some milliseconds."""

    rank: int
    ask: Ask
    pause: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to the rank that asks, over the connection on which it asked."""

    rank: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Adopt:
    """A new view; steps from `first_step` on that were dispatched are posted again."""

    view: View


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank that has no next view: RankExcluded or MoeGroupLost."""

    error: RankExcluded | MoeGroupLost


Effect: TypeAlias = Send | Fence | AskRank | Reply | Adopt | End
Effects: TypeAlias = tuple[Effect, ...]
