"""The block tables of a request, from the pages and rows that SGLang passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.connectors.sglang.components import KV, Component
from kvxfer.connectors.sglang.pools import group_ids
from kvxfer.errors import InvalidArgument
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.blocks import ABSENT


class Tables:
    """Block tables with a row for each component. The KV cache's row has all pages of a prompt. The
    row of a state has entries at its end: the pages of a window, or one row for the whole prompt.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(zip(components, group_ids(components), strict=True))
        layers = [component for component in components for _ in component.layers]
        self.kv_layers = tuple(at for at, one in enumerate(layers) if one.kind == KV)
        self.state_layers = tuple(at for at, one in enumerate(layers) if one.kind != KV)

    @property
    def groups(self) -> int:
        return len(self._components)

    @property
    def num_pages(self) -> int:
        """The pages of the KV cache, or the items of the first state if the model has none."""
        return self._components[0][0].items

    def of_pages(self, pages: Sequence[int]) -> BlockIds:
        """Returns the table of a prompt's first pages, without state."""
        table = np.full((self.groups, len(pages)), ABSENT, dtype=np.int32)
        component, ids = self._components[0]
        if component.kind == KV:
            table[0] = _checked(component, ids, np.asarray(pages, dtype=np.int64))
        return table

    def of_prompt(self, pages: Sequence[int], states: Sequence[Any] | None) -> BlockIds:
        """Returns the table of a whole prompt: its pages, and the items of each state that SGLang
        passes with the last chunk.

        Raises InvalidArgument if these do not fit the pool.
        """
        table = self.of_pages(pages)
        for group, (component, ids) in enumerate(self._components):
            if component.kind == KV:
                continue
            given = None if states is None else states[component.place]
            items = np.ravel(np.asarray([] if given is None else given, dtype=np.int64))
            if not 1 <= len(items) <= (1 if component.is_row else len(pages)):
                raise InvalidArgument(
                    f"SGLang gives {len(items)} items of {component.kind} state for a prompt of "
                    f"{len(pages)} pages; use SGLang 0.5.23 on both sides"
                )
            table[group, len(pages) - len(items) :] = _checked(component, ids, items)
        return table


def _checked(component: Component, ids: range, items: np.ndarray[Any, Any]) -> BlockIds:
    outside = items[(items < 0) | (items >= len(ids))]
    if len(outside):
        raise InvalidArgument(
            f"item {int(outside[0])} of SGLang's {component.kind} buffers, which have {len(ids)}; "
            "use SGLang 0.5.23"
        )
    return (items + ids.start).astype(np.int32)
