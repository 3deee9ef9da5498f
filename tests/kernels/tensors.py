"""The device of the kernels: Triton's interpreter (tests/conftest.py), or a GPU with
TRITON_INTERPRET=0."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
import torch

DEVICE: Final = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def of(array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> torch.Tensor:
    """Returns a copy on the device of the kernels."""
    return torch.from_numpy(array.copy()).to(DEVICE)


def random_bytes(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
