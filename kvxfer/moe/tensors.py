"""Tensors of the caller, and memory that is given out as tensors, of numpy or torch."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgument
from kvxfer.moe.shape import ITEM_BYTES

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "npt.NDArray[Any] | torch.Tensor"

_ITEM_BYTES: Final[dict[str, int]] = {"int32": 4, **ITEM_BYTES}
# Dtypes that numpy lacks, and the integers that hold their bits.
_AS_NUMPY: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


_KINDS: Final[dict[type, str]] = {np.int64: "iu", np.float32: "f"}


def is_torch(value: object) -> bool:
    """Returns whether a value is a tensor of torch, without importing torch."""
    return hasattr(value, "data_ptr")


@functools.cache
def _name_of(dtype: object) -> str:
    """Returns the name of a dtype of torch or numpy."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def address_of(value: Any, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the address of a contiguous tensor in host memory of this dtype and shape. In numpy,
    bfloat16 and float8_e4m3fn may also be unsigned integers with their bits. Raises
    InvalidArgument."""
    if is_torch(value):
        contiguous = value.is_contiguous() and value.is_cpu
    elif isinstance(value, np.ndarray):
        contiguous = value.flags.c_contiguous
    else:
        raise InvalidArgument(f"{name} is a {type(value).__name__}, not a torch tensor or an array")
    found = _name_of(value.dtype)
    if value.shape != shape or (found != dtype and found != _AS_NUMPY.get(dtype)):
        raise InvalidArgument(
            f"{name} is {found} {list(value.shape)}; it has to be {dtype} {list(shape)}"
        )
    if not contiguous:
        raise InvalidArgument(f"{name} is not contiguous in host memory")
    return int(value.data_ptr() if is_torch(value) else value.ctypes.data)


def choices(
    value: Any, name: str, dtype: type[np.int64 | np.float32], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Converts what a router returns, integers or floats of any width on the CPU, to an array of
    this dtype. Raises InvalidArgument."""
    if is_torch(value):
        if not value.is_cpu:
            raise InvalidArgument(f"{name} is on {value.device}; it has to be in host memory")
        value = value.detach() if value.requires_grad else value
        found_dtype = _name_of(value.dtype)
        as_float = "float" in found_dtype and found_dtype != "float32"
        value = (value.float() if as_float else value).numpy()
    try:
        found: npt.NDArray[Any] = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise InvalidArgument(f"{name} is not an array: {error}") from None
    if found.shape != shape or found.dtype.kind not in _KINDS[dtype]:
        raise InvalidArgument(
            f"{name} is {found.dtype.name} {list(found.shape)}; it has to be "
            f"{np.dtype(dtype).name} {list(shape)}"
        )
    return np.ascontiguousarray(found, dtype)


class Room:
    """Memory that grows, given out as one tensor at a time: the next one overlaps the last.

    memory: the first memory, of whole elements.
    """

    def __init__(
        self, dtype: str, memory: npt.NDArray[np.uint8] | None = None, *, torch: bool
    ) -> None:
        self._dtype, self._torch = dtype, torch
        self._hold(np.empty(_ITEM_BYTES[dtype], np.uint8) if memory is None else memory)

    def _hold(self, memory: npt.NDArray[np.uint8]) -> None:
        count = memory.nbytes // _ITEM_BYTES[self._dtype]
        self._count, self._address = count, int(memory.ctypes.data)
        self._whole: Any = tensor_in(memory, self._dtype, (count,), torch=self._torch)
        self._rows: Any = self._whole
        self._row: tuple[int, ...] = ()

    def tensor(self, shape: tuple[int, ...]) -> tuple[Any, int]:
        """Returns a tensor of this shape, whose contents are undefined, and its address."""
        if shape[1:] != self._row or shape[0] > len(self._rows):
            self._fit(shape)
        rows = self._rows.narrow(0, 0, shape[0]) if self._torch else self._rows[: shape[0]]
        return rows, self._address

    def _fit(self, shape: tuple[int, ...]) -> None:
        """Divides all memory into rows of this shape: later shapes differ in their number."""
        count = math.prod(shape)
        if count > self._count:
            most = max(count, self._count * 3 // 2)
            self._hold(np.empty(most * _ITEM_BYTES[self._dtype], np.uint8))
        self._row = shape[1:]
        row = math.prod(self._row)
        rows = self._count // row if row else shape[0]
        self._rows = self._whole[: rows * row].reshape((rows, *self._row))


def memory_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory that the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def tensor_in(
    memory: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], *, torch: bool
) -> Tensor:
    """Returns the memory, which has the size of the tensor, as a tensor."""
    if not torch:
        return memory.view(_AS_NUMPY.get(dtype, dtype)).reshape(shape)
    import torch as library

    return library.from_numpy(memory).view(getattr(library, dtype)).view(*shape)
