"""The measured cases: tokens and their experts, and the rows that move between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SEED: Final = 26
ITEM_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A measured case. Each rank has `tokens` tokens in bf16. Each of them goes to `top_k` experts,
    which are spread evenly."""

    tokens: int
    ranks: int
    rounds: int = 20
    """Rounds in each block."""
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8

    @property
    def name(self) -> str:
        return f"EP {self.ranks}, {self.tokens:,} tokens"

    @property
    def row_bytes(self) -> int:
        return self.hidden * ITEM_BYTES


CASES: Final = (
    Case(128, 2),
    Case(128, 4),
    Case(128, 8),
    Case(4096, 2, rounds=10),
    Case(512, 8, rounds=10),
)


def expert_ids(case: Case, rank: int) -> NDArray[np.int64]:
    """Returns the logical experts of this rank's tokens, [tokens, top_k]: distinct and equally
    likely."""
    random = np.random.default_rng([_SEED, case.tokens, case.ranks, rank])
    drawn = random.random((case.tokens, case.experts), np.float32)
    return np.argpartition(drawn, case.top_k, axis=1)[:, : case.top_k].astype(np.int64)


class Routes:
    """The rows that move: a token goes once to each rank that has one of its experts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        experts = case.experts // case.ranks
        self.reached = np.zeros((case.ranks, case.tokens, case.ranks), np.bool_)
        """True if a token goes to a rank: [source, token, destination]."""
        for rank in range(case.ranks):
            np.put_along_axis(self.reached[rank], expert_ids(case, rank) // experts, True, axis=1)
        self.rows = self.reached.sum(axis=1).astype(np.int64)
        """The number of rows, [source, destination]."""

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, also within a rank. Dispatch moves them, combine returns them."""
        return int(self.rows.sum()) * self.case.row_bytes

    @property
    def expanded_bytes(self) -> int:
        """The bytes of the rows by expert: a token counts once for each of its experts."""
        case = self.case
        return case.ranks * case.tokens * case.top_k * case.row_bytes

    def sent(self, rank: int) -> NDArray[np.int64]:
        """Returns the tokens of this rank's rows: all for rank 0, then all for rank 1, …"""
        return np.nonzero(self.reached[rank].T)[1]

    def dispatched(self, rank: int) -> NDArray[np.int64]:
        """Returns the rows that this rank receives, as places in the tokens of all ranks in
        order."""
        source, token = np.nonzero(self.reached[:, :, rank])
        return source * self.case.tokens + token

    def combined(self, rank: int) -> NDArray[np.int64]:
        """Returns the rows that return to this rank, as places in the rows that all ranks
        received."""
        before = np.concatenate(([0], np.cumsum(self.rows.sum(axis=0))))[:-1]
        begins = before + self.rows[:rank].sum(axis=0)
        return np.concatenate(
            [
                np.arange(begin, begin + count)
                for begin, count in zip(begins, self.rows[rank], strict=True)
            ]
        )
