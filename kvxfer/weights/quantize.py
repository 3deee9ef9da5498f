"""The quantisation of a parameter's box to 8 bits, with one scale for each cell.

Cells are counted from the first element of the whole parameter, so a box may begin and end within
a cell. Each box finds the greatest magnitude of its elements of a cell. The maximum over all boxes
gives each box the same values as a quantisation of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from kvxfer.weights.torch_boxes import Box


class Quantization(NamedTuple):
    """A format in which a parameter is sent: `dtype`, and float32 scales to multiply it by."""

    dtype: Literal["float8_e4m3fn", "int8"]
    cell: tuple[int, int]
    """Rows and columns that share one scale; 0 for all. Dimensions before the last two index
    separate matrices, such as fused experts."""
    suffix: str
    """The suffix that makes the name of the scales from that of the parameter."""


FP8_BLOCKS: Final = Quantization("float8_e4m3fn", (128, 128), "_scale_inv")
"""The format of the DeepSeek and Kimi checkpoints: `weight` and `weight_scale_inv`."""
FP8_CHANNELS: Final = Quantization("float8_e4m3fn", (1, 0), "_scale")
"""A scale for each output channel, as in compressed-tensors: `weight_scale` of `[rows, 1]`."""
FP8_TENSOR: Final = Quantization("float8_e4m3fn", (0, 0), "_scale")
"""One scale, `[1]`; one for each expert of fused experts."""
INT8_CHANNELS: Final = Quantization("int8", (1, 0), "_scale")

Quantize: TypeAlias = Callable[[str, tuple[int, ...]], Quantization | None]
"""A function from a parameter's checkpoint name and whole shape to its format; None if it is sent
without scales."""

LIMITS: Final = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The greatest magnitude of each dtype; for int8, the same on both sides of zero."""
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny
_SLAB: Final = 1 << 24
"""Elements that are processed at a time, in float32."""
_SLAB_OF_CPU: Final = 1 << 19  # fits the cache, and memory is reused


def cell_of(how: Quantization, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the elements that share a scale, along each dimension."""
    matrix = (size or length for size, length in zip(how.cell, whole[-2:], strict=True))
    return (1,) * (len(whole) - 2) + tuple(matrix)


def cells_of(cell: tuple[int, ...], box: Box) -> Box:
    """Returns the scales of a box: those of all cells in which it has an element."""
    ends = zip(box.offset, box.shape, cell, strict=True)
    ranges = [(first // size, -(-(first + length) // size)) for first, length, size in ends]
    return Box(tuple(first for first, _ in ranges), tuple(end - first for first, end in ranges))


def as_sent(how: Quantization, along: tuple[int, ...], empty: int) -> tuple[int, ...]:
    """Returns a shape or offset of scales as in checkpoints: one scale has no rows and columns."""
    return along if any(how.cell) else along[:-2] or (empty,)


@torch.no_grad()
def take_maxima(
    tensor: torch.Tensor, cell: tuple[int, ...], box: Box, maxima: torch.Tensor
) -> None:
    """Writes the greatest magnitude of each of the box's cells; NaN if one of its elements is NaN.

    Arguments:
        tensor: the box, of any strides and any floating dtype.
        maxima: float32, of the shape of `cells_of`.
    """
    maxima.zero_()
    first = box.offset[0] // cell[0]
    for begin, end in _slabs(tensor):
        peaks = tensor[begin:end].abs()
        for dimension, (offset, size) in enumerate(zip(box.offset, cell, strict=True)):
            peaks = _peaks(peaks, dimension, offset + (0 if dimension else begin), size)
        at = (box.offset[0] + begin) // cell[0] - first
        rows = maxima[at : at + len(peaks)]
        torch.maximum(rows, peaks.float(), out=rows)


@torch.no_grad()
def make_scales(maxima: torch.Tensor, dtype: str) -> None:
    """Turns greatest magnitudes into scales, in place.

    A scale is the maximum divided by 448, as in `per_block_cast_to_fp8` of DeepGEMM, or by 127, as
    in vLLM's `per_token_quant_int8`. Their lower bounds on the maximum are not used. A cell of
    zeros has the scale 1, as has a cell whose scale would not be a normal float32.
    """
    # Divides by a tensor: on a GPU, torch multiplies by the reciprocal of a number, rounding twice.
    maxima.div_(torch.full((), LIMITS[dtype], device=maxima.device))
    maxima.masked_fill_(maxima < _SMALLEST_SCALE, 1.0)


@torch.no_grad()
def quantize_box(
    tensor: torch.Tensor, cell: tuple[int, ...], box: Box, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Divides by the scales in float32, rounds to the nearest, ties to even, and saturates.

    scales: of the shape of `cells_of`. out: of the box's shape; its dtype is what is sent.
    """
    limit = LIMITS[str(out.dtype).removeprefix("torch.")]
    which = [
        torch.arange(offset % size, offset % size + length, device=tensor.device) // size
        for offset, length, size in zip(box.offset, box.shape, cell, strict=True)
    ]
    for begin, end in _slabs(tensor):
        spread = scales.index_select(0, which[0][begin:end])
        for dimension in range(1, spread.dim()):
            if spread.shape[dimension] > 1:
                spread = spread.index_select(dimension, which[dimension])
        values = tensor[begin:end] / spread
        values.clamp_(-limit, limit)
        if not out.is_floating_point():
            values.round_()
        out[begin:end].copy_(values)


def _peaks(magnitudes: torch.Tensor, dimension: int, first: int, size: int) -> torch.Tensor:
    """Returns the maximum of each cell along a dimension, whose first element is at `first`."""
    if size == 1:
        return magnitudes
    length = magnitudes.shape[dimension]
    head = min(-first % size, length)
    count, tail = divmod(length - head, size)
    parts = []
    if head:
        parts.append(magnitudes.narrow(dimension, 0, head).amax(dimension, keepdim=True))
    if count:
        middle = magnitudes.narrow(dimension, head, count * size)
        around = magnitudes.shape
        split = middle.view(*around[:dimension], count, size, *around[dimension + 1 :])
        parts.append(split.amax(dimension + 1))
    if tail:
        rest = magnitudes.narrow(dimension, length - tail, tail)
        parts.append(rest.amax(dimension, keepdim=True))
    return torch.cat(parts, dimension) if len(parts) > 1 else parts[0]


def _slabs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields ranges of the first dimension, each of at least one row."""
    most = _SLAB_OF_CPU if tensor.device.type == "cpu" else _SLAB
    step = max(1, most * len(tensor) // tensor.numel())
    for begin in range(0, len(tensor), step):
        yield begin, min(begin + step, len(tensor))
