"""The placement of experts on ranks, and the choice of the replica that a rank sends to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgument
from kvxfer.moe.shape import MOST_EXPERTS, MOST_RANKS

NO_REPLICA: Final = -1


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of each rank.

    ranks: the logical experts of each rank, by local index. An expert may be on several ranks: any
    of its replicas computes the same. Raises InvalidArgument if an expert is on no rank, or twice
    on one.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranks) <= MOST_RANKS:
            raise InvalidArgument(f"the placement has {len(self.ranks)} ranks")
        if sum(map(len, self.ranks)) > MOST_EXPERTS:
            raise InvalidArgument(f"the placement has more than {MOST_EXPERTS} physical experts")
        for rank, experts in enumerate(self.ranks):
            if len(set(experts)) < len(experts):
                raise InvalidArgument(f"rank {rank} has an expert twice: {list(experts)}")
        placed = {expert for experts in self.ranks for expert in experts}
        missing = set(range(len(placed))) - placed
        if not placed or missing:
            raise InvalidArgument(f"no rank has expert {min(missing, default=0)}")

    @classmethod
    def even(cls, experts: int, ranks: int, copies: int = 1) -> Self:
        """Places neighbouring experts together, the same number on each rank, or one more. With
        several `copies`, those of an expert are as many ranks apart as possible."""
        if not 1 <= copies <= ranks:
            raise InvalidArgument(f"{copies} copies of an expert do not fit {ranks} ranks")
        placed: list[list[int]] = [[] for _ in range(ranks)]
        for copy in range(copies):
            for expert in range(experts):
                placed[(expert * ranks // experts + copy * (ranks // copies)) % ranks].append(
                    expert
                )
        return cls(tuple(map(tuple, placed)))

    @property
    def experts(self) -> int:
        """The number of logical experts."""
        return 1 + max(expert for experts in self.ranks for expert in experts)

    def table(
        self, alive: Sequence[bool], rank: int, near: Collection[int] = ()
    ) -> npt.NDArray[np.int64]:
        """Returns where `rank` sends each logical expert's tokens: destination rank << 32 | local
        expert, or NO_REPLICA.

        alive: whether each rank is alive. near: the ranks on this rank's host. Its own replica
        comes first, then one on its host. Ranks without either take turns among the replicas.
        """
        replicas: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]
        for owner, experts in enumerate(self.ranks):
            if alive[owner]:
                for local, expert in enumerate(experts):
                    replicas[expert].append((owner, local))
        table = np.full(len(replicas), NO_REPLICA, np.int64)
        for expert, found in enumerate(replicas):
            if found:
                owner, local = self._chosen(expert, found, alive, rank, near)
                table[expert] = owner << 32 | local
        return table

    def _chosen(
        self,
        expert: int,
        replicas: list[tuple[int, int]],
        alive: Sequence[bool],
        rank: int,
        near: Collection[int],
    ) -> tuple[int, int]:
        owners = {owner for owner, _ in replicas}
        if rank in owners:
            replicas = [each for each in replicas if each[0] == rank]
        elif on_host := [each for each in replicas if each[0] in near]:
            replicas = on_host
        turn = sum(alive[each] and each not in owners for each in range(rank))
        return replicas[(expert + turn) % len(replicas)]
