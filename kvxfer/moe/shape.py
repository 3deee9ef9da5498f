"""The shape of steps, on which all ranks of a group agree before the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from kvxfer.errors import InvalidArgument

DType: TypeAlias = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
}
_FP8: Final = "float8_e4m3fn"
MOST_EXPERTS: Final = 1 << 16
MOST_RANKS: Final = 1 << 12
_MOST: Final = {"experts": MOST_EXPERTS, "hidden": 1 << 20, "top_k": 64, "slots": 16}

_Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """The shape of every step of a group: equal at all ranks.

    experts: the number of logical experts, which the router chooses. hidden: elements of a token.
    top_k: experts of a token. max_tokens: the most tokens of one rank in one step. slots: steps
    that may be under way at once.

    input: dtype of `x`. wire: dtype on the way to the experts; the input's dtype, a narrower float,
    or float8_e4m3fn. With `scale_block`, float8_e4m3fn has one float32 scale for each block of this
    many elements of a row (the last block may be shorter): the sender quantises, or passes on the
    caller's scales if the input is float8_e4m3fn too. combine: dtype of what the experts return,
    also on the way back. output: dtype of the sum. wire, combine and output default to the input's
    dtype; combine and output to bfloat16 if the input is float8_e4m3fn.

    Raises InvalidArgument.
    """

    experts: _Size
    hidden: _Size
    top_k: _Size
    max_tokens: _Size
    input: DType = "bfloat16"
    wire: DType = None  # type: ignore[assignment]
    combine: DType = None  # type: ignore[assignment]
    output: DType = None  # type: ignore[assignment]
    scale_block: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    slots: _Size = 2

    def __post_init__(self) -> None:
        wide: DType = "bfloat16" if self.input == _FP8 else self.input
        for name, default in (("wire", self.input), ("combine", wide), ("output", wide)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._require_sizes()
        self._require_dtypes()

    def _require_sizes(self) -> None:
        for name in ("experts", "hidden", "top_k", "max_tokens", "slots"):
            value, most = getattr(self, name), _MOST.get(name, 1 << 24)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidArgument(f"{name} is {value!r}; it has to be from 1 to {most}")
        if self.top_k > self.experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, but there are only {self.experts} experts"
            )

    def _require_dtypes(self) -> None:
        for name in ("input", "wire", "combine", "output"):
            dtype = getattr(self, name)
            if dtype not in ITEM_BYTES:
                raise InvalidArgument(
                    f"{name} is {dtype!r}; choose from {', '.join(sorted(ITEM_BYTES))}"
                )
            if dtype == _FP8 and name in ("combine", "output"):
                raise InvalidArgument(f"{name} is {_FP8}, which is too coarse for sums")
        if self.input == _FP8 and self.wire != _FP8:
            raise InvalidArgument(f"the input is {_FP8}, so wire has to be, not {self.wire}")
        block = self.scale_block
        if not isinstance(block, int) or not 0 <= block <= self.hidden:
            raise InvalidArgument(
                f"scale_block is {block!r}; it has to be from 1 to hidden ({self.hidden}), or 0"
            )
        if block and self.wire != _FP8:
            raise InvalidArgument(f"scale_block is for a wire of {_FP8}, not of {self.wire}")
        if self.wire == _FP8 and self.input != _FP8 and not block:
            raise InvalidArgument(f"a wire of {_FP8} needs a scale_block, such as 128")

    @property
    def scales(self) -> int:
        """The number of float32 scales of a token, the last one maybe of a shorter block; 0 without
        `scale_block`."""
        return -(-self.hidden // self.scale_block) if self.scale_block else 0
