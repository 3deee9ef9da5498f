"""The results of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.moe.tensors import Tensor

Layout: TypeAlias = Literal["experts", "padded", "tokens"]
_Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The tokens that have arrived for this rank's experts, in memory of the group: valid until the
    slot's combine_recv().

    members: the ranks that run the step.
    x: rows of the wire's dtype. With layout "experts": [rows, hidden], where local expert e has
    `expert_rows[e]` rows from row `begins[e]` on. "padded": [experts, capacity, hidden]. "tokens":
    [tokens, hidden], where source rank s has `source_rows[s]` rows from row `begins[s]` on. With
    "tokens", and if combine has the same dtype, x is in answers(): it is valid only until
    combine_send(), and what overwrites it is sent back without a copy. Memory between these rows
    is undefined.
    scales: [..., scales of a row] float32 for the rows of x, if the wire has scales: one for each
    `scale_block` elements, the last one for the rest. expert_rows: rows by local expert; a token
    has one, however often it chose the expert. source_rows: tokens by source rank.
    ids, weights: only with "tokens": [tokens, top_k] int32 local experts, -1 for none, and float32.
    No local expert is twice in a row; the weights of one that was chosen several times are added.
    missing: ranks whose tokens are not here because they were lost; if some of their rows are here,
    these are zero.
    """

    step: int
    members: tuple[int, ...]
    layout: Layout
    x: Any
    scales: Any
    expert_rows: _Counts
    begins: _Counts
    source_rows: _Counts
    ids: Any
    weights: Any
    missing: tuple[int, ...]
    scale_block: int


@dataclass(frozen=True, slots=True)
class Combined:
    """The sum of each token's experts.

    out: [tokens, hidden] of the output's dtype; unless the caller gave `out`, in memory of the
    group that the slot's next combine_recv() reuses. missing: ranks that had tokens of this one,
    and whose contribution is absent for all of them. Weights are not scaled up to make up for it.
    """

    step: int
    out: Tensor
    missing: tuple[int, ...]
    _ids: npt.NDArray[np.int64]
    _table: npt.NDArray[np.int64]

    @property
    def contributed(self) -> npt.NDArray[np.bool_]:
        """[tokens, top_k]: whether that expert's output is in `out`. False if its id is -1, if no
        replica was alive, or if its rank is missing."""
        owners = np.where(self._ids >= 0, self._table[self._ids] >> 32, -1)
        return (owners >= 0) & ~np.isin(owners, self.missing)
