"""Weights in 8 bits with scales: of a box of a parameter, by cells that share one scale.

Cells are counted from the first element of the whole parameter, so a box may begin and end within
a cell. Each box that has elements of a cell gives the greatest magnitude of these. By the greatest
of them all, each box gets the values that the whole parameter would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from kvxfer.weights.torch_boxes import Box


class Quantization(NamedTuple):
    """How a parameter is sent: as `dtype`, and float32 scales to multiply it with."""

    dtype: Literal["float8_e4m3fn", "int8"]
    cell: tuple[int, int]
    """Rows and columns that share one scale; 0 for all. Dimensions before the last two are those of
    matrices apart, such as fused experts."""
    suffix: str
    """What the name of the scales has behind the parameter's."""


FP8_BLOCKS: Final = Quantization("float8_e4m3fn", (128, 128), "_scale_inv")
"""As in the checkpoints of DeepSeek and Kimi: `weight` and `weight_scale_inv`."""
FP8_CHANNELS: Final = Quantization("float8_e4m3fn", (1, 0), "_scale")
"""A scale for each output channel, as in compressed-tensors: `weight_scale` of `[rows, 1]`."""
FP8_TENSOR: Final = Quantization("float8_e4m3fn", (0, 0), "_scale")
"""One scale, `[1]`; of fused experts one for each."""
INT8_CHANNELS: Final = Quantization("int8", (1, 0), "_scale")

Quantize: TypeAlias = Callable[[str, tuple[int, ...]], Quantization | None]
"""Of a parameter's name in the checkpoint and the shape of the whole: None to send it as it is."""

LIMITS: Final = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The greatest magnitude of each dtype; of int8 the same on both sides of zero."""
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny
_SLAB: Final = 1 << 24
"""Elements that are computed on at a time, in float32."""
_SLAB_OF_CPU: Final = 1 << 19  # stays in the cache, and in memory that was used before


def cell_of(how: Quantization, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Elements that share a scale, along each dimension."""
    matrix = (size or length for size, length in zip(how.cell, whole[-2:], strict=True))
    return (1,) * (len(whole) - 2) + tuple(matrix)


def cells_of(cell: tuple[int, ...], box: Box) -> Box:
    """The scales of a box: those of all cells that it has an element of."""
    ends = zip(box.offset, box.shape, cell, strict=True)
    ranges = [(first // size, -(-(first + length) // size)) for first, length, size in ends]
    return Box(tuple(first for first, _ in ranges), tuple(end - first for first, end in ranges))


def as_sent(how: Quantization, along: tuple[int, ...], empty: int) -> tuple[int, ...]:
    """A shape or an offset of scales as checkpoints have it: one scale has no rows and columns."""
    return along if any(how.cell) else along[:-2] or (empty,)


@torch.no_grad()
def take_maxima(
    tensor: torch.Tensor, cell: tuple[int, ...], box: Box, maxima: torch.Tensor
) -> None:
    """Writes the greatest magnitude of each of the box's cells; NaN where one element is NaN.

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
    in vLLM's `per_token_quant_int8`. Neither's lower bound on the maximum is taken. A cell of zeros
    has the scale 1, as has one whose scale would be no normal float32.
    """
    # By a tensor: on a GPU, torch multiplies with the reciprocal of a number, which rounds twice.
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
    """The greatest of each cell along a dimension, whose first element is at `first`."""
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
    """Ranges of the first dimension, of at least one."""
    most = _SLAB_OF_CPU if tensor.device.type == "cpu" else _SLAB
    step = max(1, most * len(tensor) // tensor.numel())
    for begin in range(0, len(tensor), step):
        yield begin, min(begin + step, len(tensor))
