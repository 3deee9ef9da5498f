"""The caller's memory: the address of a passed object, and the GPU that the object reports. Arrays
and tensors are recognised by their attributes; their libraries are not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvxfer.engine import dlpack
from kvxfer.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ForeignMemory:
    """A contiguous range that may be written; `owner` keeps it valid, `what` names it in errors.

    `on_gpu` and `gpu`: whether the object reports memory of a GPU, and the number of the GPU.
    """

    what: str
    address: int
    nbytes: int
    owner: object
    on_gpu: bool = False
    gpu: int | None = None

    def check_gpu(self, gpu: int | None) -> None:
        """Compares with the GPU that CUDA reports. Raises InvalidArgument if they differ."""
        if not self.on_gpu:
            return
        if gpu is None:
            raise InvalidArgument(
                f"CUDA does not know the {self.what} at address {self.address:#x} as memory of a "
                "GPU: it was freed, or belongs to another process; pass memory that this process "
                "has allocated on a GPU"
            )
        if self.gpu is not None and self.gpu != gpu:
            raise InvalidArgument(
                f"the {self.what} at address {self.address:#x} says that it is on GPU {self.gpu}, "
                f"and CUDA says GPU {gpu}; correct its device, or pass address and nbytes"
            )


def foreign_memory(target: Any, nbytes: int | None) -> ForeignMemory:
    """Returns the memory of a numpy array, a torch tensor on the CPU or a GPU, a writable buffer,
    an object with `__cuda_array_interface__` or DLPack on a GPU, or of an address and a length in
    bytes.

    Raises InvalidArgument that names what was passed, also if it is not contiguous.
    """
    if isinstance(target, int):
        if nbytes is None:
            raise InvalidArgument("register(address) needs nbytes, the length in bytes")
        if not 0 < target < 2**64:
            raise InvalidArgument(f"target is {target}; pass an address of this process")
        return ForeignMemory("memory", target, nbytes, None)
    if hasattr(target, "data_ptr"):
        found = _of_tensor(target)
    elif hasattr(target, "__cuda_array_interface__"):
        found = _of_cuda_array(target, target.__cuda_array_interface__)
    elif (device := dlpack.device_of(target)) is not None and device[0] == dlpack.CUDA:
        found = _of_dlpack(target, device[1])
    else:
        found = _of_buffer(target)
    if nbytes is None:
        return found
    if nbytes > found.nbytes:
        raise InvalidArgument(
            f"nbytes={nbytes} is more than the {found.nbytes} bytes that were passed"
        )
    return replace(found, nbytes=nbytes)


def _of_tensor(tensor: Any) -> ForeignMemory:
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a tensor on {device} cannot be registered; copy it to the CPU or a CUDA GPU"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument("the tensor is not contiguous; register tensor.contiguous()")
    on_gpu = device.type == "cuda"
    return ForeignMemory(
        "tensor",
        int(tensor.data_ptr()),
        tensor.nbytes,
        tensor,
        on_gpu,
        device.index if on_gpu else None,
    )


def _of_cuda_array(target: Any, interface: dict[str, Any]) -> ForeignMemory:
    import numpy as np

    what = type(target).__name__
    address, read_only = interface["data"]
    shape, item = tuple(interface["shape"]), np.dtype(interface["typestr"]).itemsize
    _require_plain(what, shape, interface.get("strides"), item, read_only=read_only)
    return ForeignMemory(what, int(address), math.prod(shape) * item, target, on_gpu=True)


def _of_dlpack(target: Any, gpu: int) -> ForeignMemory:
    what = type(target).__name__
    try:
        tensor = dlpack.export(target)
    except BufferError as error:
        raise InvalidArgument(
            f"the {what} does not export its memory ({error}); pass address and nbytes"
        ) from None
    _require_plain(what, tensor.shape, tensor.strides, 1, read_only=tensor.read_only)
    nbytes = math.prod(tensor.shape) * tensor.item_bits // 8
    return ForeignMemory(what, tensor.address, nbytes, tensor.capsule, on_gpu=True, gpu=gpu)


def _require_plain(
    what: str,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    item: int,
    *,
    read_only: bool,
) -> None:
    """Raises InvalidArgument if an array is read-only, empty, or not contiguous in C order; `item`
    is an item's size in the unit of the strides."""
    if read_only:
        raise InvalidArgument(f"the {what} is read-only; register one that peers may write into")
    if 0 in shape:
        raise InvalidArgument(
            f"the {what} is empty (shape {tuple(shape)}); register one that is not"
        )
    step = item
    for length, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if length > 1 and stride != step:
            raise InvalidArgument(
                f"the {what} is not contiguous (shape {tuple(shape)}, strides "
                f"{tuple(strides or ())}); register a contiguous copy"
            )
        step *= length


def _of_buffer(target: Any) -> ForeignMemory:
    import numpy as np

    what = type(target).__name__
    try:
        view = memoryview(target)
    except TypeError:
        raise InvalidArgument(
            f"cannot register a {what}; pass a numpy array, a torch tensor, a writable buffer, "
            "an array on a CUDA GPU, or an address and nbytes"
        ) from None
    if view.readonly or not view.c_contiguous or view.nbytes == 0:
        raise InvalidArgument(
            f"the {what} cannot be registered: it must be writable, contiguous and not empty"
        )
    address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    # A bytearray cannot move while the view of it exists.
    return ForeignMemory(what, address, view.nbytes, view)
