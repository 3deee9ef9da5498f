"""The pages that a request moves: drawn from a seed, so that both processes know them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of a request: page `src[i]` of the source goes to page `dst[i]` of the
    destination."""

    page_bytes: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return len(self.src) * self.page_bytes

    @property
    def contiguous(self) -> int:
        """The number of pages that follow another one directly on both sides, in whatever order: an
        engine could coalesce them."""
        order = np.argsort(self.src)
        src, dst = self.src[order], self.dst[order]
        return int(np.count_nonzero((np.diff(src) == 1) & (np.diff(dst) == 1)))


class PageDraw(msgspec.Struct, frozen=True):
    """`requests` requests of `request_bytes` each, scattered over pools of `pool_bytes`. No page
    occurs twice on a side; `round_index` tells draws of one seed apart."""

    seed: int
    page_bytes: int
    request_bytes: int
    pool_bytes: int
    requests: int = 1
    round_index: int = 0

    def of_round(self, round_index: int) -> PageDraw:
        """Returns the draw of another round: other pages, same sizes."""
        return msgspec.structs.replace(self, round_index=round_index)

    def draw(self) -> list[PageLists]:
        """Returns the requests' pages; in a request no two are contiguous on both sides.

        Raises InvalidArgument if the requests do not fit the pools.
        """
        pool_pages = self.pool_bytes // self.page_bytes
        request_pages = self.request_bytes // self.page_bytes
        if request_pages == 0 or request_pages * self.requests > pool_pages:
            raise InvalidArgument(
                f"{self.requests} request(s) of {request_pages} pages do not fit pools of "
                f"{pool_pages} pages of {self.page_bytes} bytes; use a larger pool"
            )
        random = np.random.default_rng(
            [self.seed, self.round_index, self.page_bytes, self.request_bytes, self.requests]
        )
        # About one draw in three has no contiguous pages even if a request is the whole pool.
        while True:
            src, dst = (
                random.permutation(pool_pages)[: request_pages * self.requests].reshape(
                    self.requests, request_pages
                )
                for _ in range(2)
            )
            lists = [PageLists(self.page_bytes, s, d) for s, d in zip(src, dst, strict=True)]
            if not any(request.contiguous for request in lists):
                return lists
