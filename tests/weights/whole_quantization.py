"""Quantises a whole parameter, written plainly: padded, and cell by cell."""

from __future__ import annotations

import numpy as np
import torch

from kvxfer.weights.quantize import Quantization


def quantized(weight: torch.Tensor, how: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values, and the scales as a checkpoint has them."""
    if weight.dim() > 2:
        values, scales = zip(*(quantized(each, how) for each in weight), strict=True)
        found = torch.stack(scales)
        return torch.stack(values), found if any(how.cell) else found.reshape(len(weight), -1)[:, 0]
    dtype, limit = {
        "float8_e4m3fn": (torch.float8_e4m3fn, np.float32(448)),
        "int8": (torch.int8, np.float32(127)),
    }[how.dtype]
    full = weight.float().numpy()
    rows, columns = (size or length for size, length in zip(how.cell, full.shape, strict=True))
    values = torch.empty(weight.shape, dtype=dtype)
    down, across = -(-full.shape[0] // rows), -(-full.shape[1] // columns)
    scales = np.ones((down, across), np.float32)
    for row in range(down):
        for column in range(across):
            cell = np.s_[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            if (most := np.abs(full[cell]).max()) > 0:
                scales[row, column] = most / limit
            divided = np.clip(full[cell] / scales[row, column], -limit, limit)
            if how.dtype == "int8":
                divided = np.rint(divided)
            values[cell] = torch.from_numpy(divided).to(dtype)
    sent = torch.from_numpy(scales)
    return values, sent if any(how.cell) else sent.view(1)


def dequantized(values: torch.Tensor, scales: torch.Tensor, how: Quantization) -> torch.Tensor:
    """Multiplies each value by its cell's scale, as DeepSeek's `weight_dequant` and vLLM do."""
    full = values.float()
    if not any(how.cell):
        return full * scales.view(-1, *(1,) * min(2, full.dim() - len(scales.shape) + 1))
    for dimension, size in zip((-2, -1), how.cell, strict=True):
        each = scales.repeat_interleave(size or full.shape[dimension], dimension)
        scales = each.narrow(dimension, 0, full.shape[dimension])
    return full * scales
