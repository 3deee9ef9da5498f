"""How K and V of one head of a block lie where an engine keeps them in an order of its own."""

from __future__ import annotations

from typing import NamedTuple


class Packing(NamedTuple):
    """K or V of one head of a block: `rows` rows, in each of which every `tokens` tokens make a
    unit of `head_size * tokens / rows` elements. Units are the same for every block size."""

    rows: int
    tokens: int


def packing_of(name: str, head_size: int) -> tuple[Packing, Packing] | None:
    """Of K and of V, which follow each other; None where the order is not known by that name.

    Both are of vLLM's CPU attention.

    - `vec`: K is transposed, `[head_size, tokens]`; V is `[tokens, head_size]`
    - `amx`: K is `[tokens / 16, 16 * head_size]`, V `[head_size / 16, tokens / 2, 16 * 2]`
    """
    if name == "vec":
        return Packing(head_size, 1), Packing(1, 1)
    if name == "amx":
        return Packing(1, 16), Packing(head_size // 16, 2)
    return None
