"""Memory that the engine sends from and that peers may write into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.engine.native import native, translated
from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np


class MemoryRegion:
    """A registered range of memory. Any thread.

    `descriptor` is what a peer needs to write into the region, and the permission to do so: give
    it to peers only. A region of foreign memory keeps its owner alive until it is
    closed, or its engine is.
    """

    __slots__ = ("_engine", "_on_close", "_open", "_owner", "handle")

    def __init__(
        self,
        engine: native.TransferEngine,
        handle: native.MemoryRegion,
        owner: object = None,
        on_close: Callable[[MemoryRegion], None] | None = None,
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._on_close = on_close
        self._open = True
        self.handle = handle

    @property
    def address(self) -> int:
        """Of its first byte, in this process."""
        return self.handle.address

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.handle.nbytes

    @property
    def descriptor(self) -> bytes:
        """What peers pass as the destination of their writes: 44 opaque bytes, safe to send on."""
        return self.handle.descriptor

    def checksum(
        self,
        offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        length: int,
    ) -> int:
        """The sum, modulo 2**64, of XXH3 of each run of `length` bytes at `offsets[i]`, seeded with
        `numbers[i]`: the same wherever the runs lie, and in whatever order they are given.

        Raises OutOfBounds. Runs without the GIL.
        """
        with translated():
            return self.handle.checksum(offsets, numbers, length)

    def close(self) -> None:
        """Deregisters. Operations that read the region end with `Cancelled` first; afterwards no
        write of any peer lands in it. Blocks briefly; idempotent.

        Raises NicLost where a NIC does not let go of the memory: it must not be freed then, and
        `close` may be called again."""
        if self._open:
            with translated():
                self._engine.deregister(self.handle)
            self._open = False
            self._owner = None
            if self._on_close is not None:
                self._on_close(self)

    def __repr__(self) -> str:
        return f"MemoryRegion(address={self.address:#x}, nbytes={self.nbytes})"


class Memory(native.MemoryRegion):
    """Zeroed shareable memory, already registered: a writable buffer of bytes.

    Use it as `memoryview(memory)`, `numpy.frombuffer(memory, dtype)`, or through DLPack
    (`numpy.from_dlpack`, `torch.from_dlpack`; uint8, one dimension). The memory stays mapped for
    as long as any of these views lives.
    """

    def __init__(self, region: MemoryRegion) -> None:
        super().__init__(region.handle)
        self.region = region

    def close(self) -> None:
        """Deregisters the region; see MemoryRegion.close."""
        self.region.close()


def register(
    engine: native.TransferEngine,
    target: Any,
    nbytes: int | None,
    on_close: Callable[[MemoryRegion], None],
) -> MemoryRegion:
    """Registers a numpy array, a torch CPU tensor, a writable buffer, or an address and length.

    Arrays and tensors must be contiguous. Raises InvalidArgument naming what was passed.
    """
    if isinstance(target, int):
        if nbytes is None:
            raise InvalidArgument("register(address) needs nbytes, the length in bytes")
        address, length, owner = target, nbytes, None
    elif hasattr(target, "data_ptr"):  # torch, without importing it
        address, length, owner = _tensor_range(target), target.nbytes, target
    else:
        view = _writable_view(target)  # as owner: a bytearray cannot move while it is exported
        address, length, owner = _address_of(view), view.nbytes, view
    if nbytes is not None and nbytes > length:
        raise InvalidArgument(f"nbytes={nbytes} is more than the {length} bytes that were passed")
    with translated():
        handle = engine.register_memory(address, length if nbytes is None else nbytes)
    return MemoryRegion(engine, handle, owner, on_close)


def _tensor_range(tensor: Any) -> int:
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"a tensor on {tensor.device} cannot be registered by this version; copy it to the CPU"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument("the tensor is not contiguous; register tensor.contiguous()")
    return int(tensor.data_ptr())


def _writable_view(target: Any) -> memoryview:
    try:
        view = memoryview(target)
    except TypeError:
        raise InvalidArgument(
            f"cannot register a {type(target).__name__}; pass a numpy array, a torch CPU tensor, "
            "a writable buffer, or an address and nbytes"
        ) from None
    if view.readonly or not view.c_contiguous or view.nbytes == 0:
        raise InvalidArgument(
            f"the {type(target).__name__} cannot be registered: it must be writable, contiguous "
            "and not empty"
        )
    return view


def _address_of(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
