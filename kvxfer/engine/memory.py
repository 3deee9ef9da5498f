"""Memory that the engine sends from and that peers may write into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from kvxfer.engine.arguments import REFUSALS, refused
from kvxfer.engine.foreign_memory import foreign_memory
from kvxfer.engine.native import native, translated
from kvxfer.errors import InvalidArgument, UnknownRegion

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvxfer.engine.arguments import Bytes, Integers, Length, Offset, Readable, Writable


class MemoryRegion:
    """A registered range of memory. Any thread.

    `descriptor` permits a peer to write into the region: give it only to peers. A region of foreign
    memory keeps its owner alive until it is closed, or its engine is.
    """

    __slots__ = ("_engine", "_on_close", "_open", "_owner", "_require_nics", "handle")

    def __init__(
        self,
        engine: native.TransferEngine,
        handle: native.MemoryRegion,
        owner: object = None,
        on_close: Callable[[MemoryRegion], None] | None = None,
        require_nics: bool = False,
    ) -> None:
        self._engine = engine
        self._require_nics = require_nics
        self._owner = owner
        self._on_close = on_close
        self._open = True
        self.handle = handle

    @property
    def address(self) -> int:
        """The address of its first byte in this process."""
        return self.handle.address

    @property
    def gpu(self) -> int | None:
        """The GPU of the memory, by CUDA's number in this process; None for host memory."""
        return self.handle.gpu

    @property
    def nics(self) -> tuple[str | None, ...]:
        """The way in which each of `Engine.nics`, in their order, reaches the memory: "host" for
        host memory, "dmabuf" or "peermem" (by its address, with nvidia-peermem or libfabric) for
        memory of a GPU; None if it does not, so that writes use other NICs or tcp."""
        return self.handle.nics

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self.handle.nbytes

    @property
    def descriptor(self) -> bytes:
        """The destination that peers pass to their writes: 44 opaque bytes, safe to send."""
        return self.handle.descriptor

    def read(self, into: Writable, offset: Offset = 0) -> None:
        """Copies bytes of the region, on the host or a GPU, into a writable contiguous buffer: as
        many as it holds, from byte `offset` on. Waits for the copy, without the GIL.

        Raises OutOfBounds, UnknownRegion once the region is closed, GpuLost, and InvalidArgument
        for a buffer that is not contiguous or not writable.
        """
        self._check_open()
        try:
            self.handle.read(into, offset)
        except REFUSALS as error:
            raise refused(error, MemoryRegion.read, locals()) from None

    def write(self, data: Readable, offset: Offset = 0) -> None:
        """Copies the buffer's bytes into the region, from byte `offset` on; otherwise as read()."""
        self._check_open()
        try:
            self.handle.write(data, offset)
        except REFUSALS as error:
            raise refused(error, MemoryRegion.write, locals()) from None

    def _check_open(self) -> None:
        """Raises UnknownRegion after close(), as the caller's memory may then be gone."""
        if not self._open:
            raise UnknownRegion("the region was closed; its memory is no longer registered")

    def checksum(self, offsets: Integers, numbers: Integers, length: Length) -> int:
        """Returns the sum, modulo 2**64, of XXH3 of each run of `length` bytes at `offsets[i]`,
        seeded with `numbers[i]`. It does not depend on the place or the order of the runs.

        Raises OutOfBounds, and InvalidArgument for memory of a GPU. Runs without the GIL.
        """
        try:
            return self.handle.checksum(offsets, numbers, length)
        except REFUSALS as error:
            raise refused(error, MemoryRegion.checksum, locals()) from None

    def close(self) -> None:
        """Deregisters the region. Operations that read it end with `Cancelled` first; afterwards no
        write of any peer lands in it. Blocks briefly; idempotent.

        Raises NicLost if a NIC does not release the memory, and DeadlineExceeded if a peer on this
        host has kept memory of a GPU open for `peer_timeout`. Then the memory must not be freed,
        and `close` may be called again."""
        if self._open:
            with translated():
                self._engine.deregister(self.handle)
            self._open = False
            self._owner = None
            if self._on_close is not None:
                self._on_close(self)

    def reopen(self) -> None:
        """Registers the same range again after close(), under a new descriptor: for example memory
        of a GPU that was unmapped and is mapped again. The caller keeps its owner alive. Raises as
        Engine.register() does; idempotent."""
        if not self._open:
            with translated():
                self.handle = self._engine.register_memory(
                    self.address, self.nbytes, self._require_nics
                )
            self._open = True

    def __repr__(self) -> str:
        on = "" if self.gpu is None else f", gpu={self.gpu}"
        return f"MemoryRegion(address={self.address:#x}, nbytes={self.nbytes}{on})"


class Memory(native.MemoryRegion):
    """Zeroed shareable memory on the host or a GPU, already registered.

    Host memory is a writable buffer: use it as `memoryview(memory)`, `numpy.frombuffer(memory,
    dtype)`, or through DLPack (`numpy.from_dlpack`, `torch.from_dlpack`; uint8, one dimension).
    Memory of a GPU offers DLPack (`torch.from_dlpack`, `cupy.from_dlpack`) and
    `__cuda_array_interface__`. The memory stays allocated for as long as any of these views lives.

    Calls that take a region also take the memory itself. `region` is its MemoryRegion.
    """

    def __init__(self, region: MemoryRegion) -> None:
        super().__init__(region.handle)
        self.region = region

    @property
    def handle(self) -> native.MemoryRegion:
        """The handle of the region."""
        return self.region.handle

    @property
    def descriptor(self) -> bytes:
        """The descriptor of the region."""
        return self.region.descriptor

    def read(self, into: Writable, offset: Offset = 0) -> None:
        """Reads as MemoryRegion.read()."""
        self.region.read(into, offset)

    def write(self, data: Readable, offset: Offset = 0) -> None:
        """Writes as MemoryRegion.write()."""
        self.region.write(data, offset)

    def checksum(self, offsets: Integers, numbers: Integers, length: Length) -> int:
        """Returns the checksum of MemoryRegion.checksum()."""
        return self.region.checksum(offsets, numbers, length)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The interface of Numba's documentation, version 3; only for memory of a GPU."""
        if self.gpu is None:
            raise AttributeError("only memory of a GPU has __cuda_array_interface__")
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> None:
        """Deregisters the region; see MemoryRegion.close."""
        self.region.close()

    def __repr__(self) -> str:
        return repr(self.region).replace("MemoryRegion", "Memory", 1)


Region: TypeAlias = MemoryRegion | Memory


def alloc_shared(nbytes: Bytes) -> Buffer:
    """Allocates zeroed host memory that belongs to no engine: a writable buffer, for
    numpy.frombuffer() and torch.frombuffer(). If an engine registers it, in whole or in parts, it
    is as fast a source as `Engine.alloc`. It stays allocated as long as any view or region of it
    lives.

    Raises InvalidArgument, and OutOfMemory if the host has less memory available.
    """
    try:
        return native.SharedMemory(nbytes)
    except REFUSALS as error:
        raise refused(error, alloc_shared, locals()) from None


def register(
    engine: native.TransferEngine,
    target: Any,
    nbytes: int | None,
    owner: object,
    require_nics: bool,
    on_close: Callable[[MemoryRegion], None],
) -> MemoryRegion:
    """Registers the caller's memory (kvxfer.engine.foreign_memory says what can be passed), all of
    it or its first `nbytes`.

    CUDA's driver says whether it is memory of a GPU. Raises InvalidArgument that names what was
    passed, also if the driver and the object disagree.
    """
    memory = foreign_memory(target, nbytes)
    handle = engine.register_memory(memory.address, memory.nbytes, require_nics)
    keeper = memory.owner if owner is None else owner
    region = MemoryRegion(engine, handle, keeper, on_close, require_nics)
    try:
        memory.check_gpu(region.gpu)
    except InvalidArgument:
        region.close()
        raise
    return region
