"""Tensors that other libraries export through DLPack, read without those libraries.

The layouts are those of dlpack.h, versions 0.2 to 1.x.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

CUDA: Final = 2
"""The device type of CUDA GPUs."""

_NEWEST: Final = (1, 0)
_READ_ONLY: Final = 1

_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_address_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor; `capsule` keeps it valid.

    `strides` are counted in items; None if the tensor is contiguous.
    """

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    item_bits: int
    read_only: bool


def device_of(target: Any) -> tuple[int, int] | None:
    """Returns the type and number of an object's device; None if it does not support DLPack."""
    if not hasattr(target, "__dlpack_device__"):
        return None
    kind, number = target.__dlpack_device__()
    return int(kind), int(number)


def export(target: Any) -> Exported:
    """Returns the tensor of an object on a GPU, without waiting for its streams.

    Raises BufferError if the object does not export it.
    """
    try:
        capsule = target.__dlpack__(stream=-1, max_version=_NEWEST)
    except TypeError:  # DLPack before version 1
        capsule = target.__dlpack__(stream=-1)
    read_only = False
    if _is_named(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_address_in(capsule, b"dltensor_versioned"))
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    else:
        tensor = _Tensor.from_address(_address_in(capsule, b"dltensor"))
    return Exported(
        capsule,
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        item_bits=tensor.type_bits * tensor.type_lanes,
        read_only=read_only,
    )
