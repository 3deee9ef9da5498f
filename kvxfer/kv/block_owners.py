"""What sessions need of blocks, whoever owns them: a BlockPool, or the allocator of an engine."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from kvxfer.kv.block_pool import BlockIds, BlockState


class Pin(Protocol):
    """Keeps blocks from being reused."""

    def release(self) -> None: ...


class SourceBlocks(Protocol):
    """Blocks that prefill sends, in the order of the prompt. `BlockHold` is one."""

    @property
    def ids(self) -> BlockIds:
        """Those of a prompt that is computed in chunks may be filled in before they are sent."""

    def pin(self, reader: str) -> Pin:
        """From now on until the pin is released bytes of them may be read."""


class HeldBlocks(SourceBlocks, Protocol):
    """Blocks that an engine computes with; a context manager. `BlockHold` is one."""

    def release(self) -> None:
        """Gives them back, once nobody reads them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class TargetBlocks(Protocol):
    """Blocks that decode receives into. `BlockLease` is one."""

    @property
    def ids(self) -> BlockIds: ...

    def block_state(self) -> BlockState: ...

    def receive(self) -> None:
        """Prefill has accepted the offer."""

    def complete(self) -> None:
        """Every write has arrived."""

    def take(self) -> HeldBlocks:
        """The engine computes with them from now on."""

    def release(self) -> None:
        """No write of a transfer that failed can land in them any more."""
