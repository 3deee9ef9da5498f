"""Lists of integers as callers have them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    # A buffer: one-dimensional, of int32 or int64. (numpy says that its arrays are buffers only
    # where Python is 3.12 or newer.)
    Integers: TypeAlias = Sequence[int] | Buffer | NDArray[np.signedinteger[Any]]


def buffer_of(values: Integers) -> Any:
    """The buffer that the native engine takes."""
    # iter(): array() would take the bytes of a bytes object for the memory of its items.
    return array("q", iter(values)) if isinstance(values, Sequence) else values
