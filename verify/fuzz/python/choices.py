"""The bytes of one run of a fuzzer, taken from the front. After the end they read as zeros."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# The values at which decoders of integers fail.
_EDGES = (0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**70, -(2**70))
_FLOATS = (0.0, -1.0, 1e-9, 0.5, 1e9, 1e300, float("inf"), float("-inf"), float("nan"))


class Choices:
    def __init__(self, data: bytes) -> None:
        self._rest = data

    def __bool__(self) -> bool:
        return bool(self._rest)

    def take(self, size: int) -> bytes:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def byte(self) -> int:
        taken = self.take(1)
        return taken[0] if taken else 0

    def below(self, end: int) -> int:
        return self.byte() % end

    def flag(self) -> bool:
        return bool(self.byte() & 1)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def bytes(self) -> bytes:
        return self.take(self.byte())

    def text(self) -> str:
        return self.bytes().decode("utf-8", "replace")

    def rest(self) -> bytes:
        return self.take(len(self._rest))

    def integer(self) -> int:
        """Returns mostly a small number; sometimes the limit of a type, sometimes any number."""
        kind = self.byte()
        if kind < 0xE0:
            return kind
        if kind < 0xF0:
            return _EDGES[kind % len(_EDGES)]
        return int(struct.unpack("<q", self.take(8).ljust(8, b"\0"))[0])

    def number(self) -> float:
        kind = self.byte()
        return _FLOATS[kind] if kind < len(_FLOATS) else kind / 16
