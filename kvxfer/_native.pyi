"""The native engine. Use it through `kvxfer.Engine`; this is its exact interface."""

from typing_extensions import Buffer, CapsuleType

MAX_MESSAGE_BYTES: int
MIN_CLUSTER_KEY_BYTES: int

class Error(Exception):
    """args: (code, message); `kvxfer.errors.by_code` has the public class."""

class EngineOptions:
    """`host` and `advertise` are numeric addresses; times are in seconds."""

    def __init__(
        self,
        *,
        cluster_key: bytes,
        name: str,
        host: str,
        advertise: str,
        port: int,
        local: bool,
        tcp: bool,
        lanes: int,
        window_bytes: int,
        heartbeat_interval: float,
        peer_timeout: float,
        operation_timeout: float,
        spin: float,
    ) -> None: ...

class MemoryRegion(Buffer):
    """Registered memory; a writable buffer of bytes."""

    def __init__(self, region: MemoryRegion) -> None:
        """Another handle of the same region."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shareable(self) -> bool: ...
    @property
    def descriptor(self) -> bytes: ...
    def __dlpack__(
        self,
        *,
        stream: object = ...,
        max_version: tuple[int, int] | None = ...,
        dl_device: tuple[int, int] | None = ...,
        copy: bool | None = ...,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class TransferEngine:
    """Any method from any thread. Submitting returns (operation id, writes, bytes)."""

    def __init__(self, options: EngineOptions) -> None: ...
    def close(self) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def event_fd(self) -> int: ...
    def drain(self) -> list[tuple[str, int, int, str, str, bytes, str, int]]:
        """Completions: (kind, id, peer, code, text, data, fabric, CLOCK_MONOTONIC ns)."""

    def stats(self) -> dict[str, int]: ...
    def allocate(self, nbytes: int) -> MemoryRegion: ...
    def register_memory(self, address: int, nbytes: int) -> MemoryRegion: ...
    def deregister(self, region: MemoryRegion) -> None: ...
    def connect(self, address: str, timeout: float) -> int: ...
    def disconnect(self, peer: int) -> None: ...
    def fence(self, peer: int) -> None: ...
    def send(self, peer: int, data: bytes) -> None: ...
    def write(
        self,
        peer: int,
        source: MemoryRegion,
        destination: bytes,
        *,
        source_offset: int,
        destination_offset: int,
        length: int,
        imm: int | None,
        timeout: float,
    ) -> tuple[int, int, int]: ...
    def write_pages(
        self,
        peer: int,
        source: MemoryRegion,
        destination: bytes,
        *,
        page_length: int,
        source_pages: Buffer,
        destination_pages: Buffer,
        source_stride: int,
        destination_stride: int,
        source_offset: int,
        destination_offset: int,
        imm: int | None,
        timeout: float,
    ) -> tuple[int, int, int]: ...
    def write_imm(self, peer: int, imm: int, timeout: float) -> tuple[int, int, int]: ...
    def cancel(self, operation: int) -> None: ...
    def allocate_counter(self) -> int: ...
    def counter_value(self, imm: int) -> int: ...
    def expect(self, imm: int, total: int) -> None: ...
    def release_counter(self, imm: int) -> None: ...
