"""Tensors of the caller's, and memory that is given out as tensors: numpy's or torch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgument
from kvxfer.moe.shape import ITEM_BYTES

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "npt.NDArray[Any] | torch.Tensor"

_ITEM_BYTES: Final[dict[str, int]] = {"int32": 4, **ITEM_BYTES}
# numpy has no names for these: their bits.
_AS_NUMPY: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


def is_torch(value: object) -> bool:
    """Whether it is a tensor of torch, which is not imported for that."""
    return hasattr(value, "data_ptr")


def address_of(value: Any, name: str, dtype: str, shape: Sequence[int]) -> int:
    """The address of a contiguous tensor in host memory of this dtype and shape. bfloat16 and
    float8_e4m3fn of numpy may also be the unsigned integers of their bits. Raises
    InvalidArgument."""
    if is_torch(value):
        found = str(value.dtype).removeprefix("torch.")
        contiguous = value.device.type == "cpu" and value.is_contiguous()
        address = value.data_ptr()
    elif isinstance(value, np.ndarray):
        found = value.dtype.name
        found = dtype if found == _AS_NUMPY.get(dtype) else found
        contiguous = value.flags.c_contiguous
        address = value.ctypes.data
    else:
        raise InvalidArgument(f"{name} is a {type(value).__name__}, not a torch tensor or an array")
    if tuple(value.shape) != tuple(shape) or found != dtype:
        raise InvalidArgument(
            f"{name} is {found} {list(value.shape)}; it has to be {dtype} {list(shape)}"
        )
    if not contiguous:
        raise InvalidArgument(f"{name} is not contiguous in host memory")
    return int(address)


def choices(value: Any, name: str, dtype: type, shape: Sequence[int]) -> npt.NDArray[Any]:
    """What a router says, as an array of this dtype. Raises InvalidArgument for another shape."""
    if is_torch(value):
        value = value.detach()
        value = (value.float() if value.is_floating_point() else value).numpy()
    found: npt.NDArray[Any] = np.asarray(value)
    if found.shape != tuple(shape) or (found.dtype.kind == "f") != (dtype is np.float32):
        raise InvalidArgument(
            f"{name} is {found.dtype.name} {list(found.shape)}; it has to be "
            f"{np.dtype(dtype).name} {list(shape)}"
        )
    return np.ascontiguousarray(found, dtype)


class Room:
    """Memory that grows, given out as one tensor at a time: the next one lies over the last."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._memory = np.empty(_ITEM_BYTES[dtype], np.uint8)

    def tensor(self, shape: Sequence[int], *, torch: bool) -> tuple[Tensor, int]:
        """Of this shape, with what lies there; and its address."""
        item = _ITEM_BYTES[self.dtype]
        count, has = math.prod(shape), self._memory.nbytes // item
        if count > has:
            self._memory = np.empty(max(count, has * 3 // 2) * item, np.uint8)
        return tensor_in(self._memory, self.dtype, shape, torch=torch), self._memory.ctypes.data


def tensor_in(
    memory: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int], *, torch: bool
) -> Tensor:
    """The beginning of the memory, which is some elements of this dtype, as a tensor."""
    count = math.prod(shape)
    if not torch:
        return memory.view(_AS_NUMPY.get(dtype, dtype))[:count].reshape(shape)
    import torch as library

    return library.from_numpy(memory).view(getattr(library, dtype))[:count].view(*shape)
