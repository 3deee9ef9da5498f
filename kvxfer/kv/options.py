"""The identity and the options with which a KvEndpoint is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.settings import Seconds, check_bounds

if TYPE_CHECKING:
    from kvxfer.kv.block_table import BlockTables
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.ticket import Ticket, TicketKeys
    from kvxfer.tracing.tracer import Tracer
    from kvxfer.watched_file import WatchedFile


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """The identity of a worker when its KvEndpoint is made."""

    instance_id: str
    ticket_key: bytes | str | WatchedFile[TicketKeys] = field(repr=False)
    """The key that verifies tickets: the cluster key, or the ticket keys."""
    epoch: int = 0
    """The registration of the instance, or the start of its process; tickets name it too. An
    instance that registers leaves it out and passes set_epoch() to its Registration."""
    model: ModelIdentity | None = None
    """The model of the cache: a peer whose model differs is refused by name. Without it, or if a
    peer does not report its model, only the layouts are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """The options of a KvEndpoint. Raises InvalidArgument for a value beyond its bounds."""

    lease_seconds: Seconds = 60.0
    """The time that a side waits for the other, unless a session has another one."""
    connect_timeout: Seconds = 2.0
    """The longest time until a peer's KV endpoint answers."""
    max_early_offers_per_peer: Annotated[int, Meta(ge=0)] = 256
    """The most offers of a peer that wait for their prefill requests."""
    checksums: bool = False
    """Whether every transfer with this endpoint, in both directions, is checked by a checksum of
    its blocks before they are used, whatever the other side's setting. Both caches then have to be
    host memory: a cache on a GPU raises InvalidArgument in the constructor of the endpoint, or when
    the transfer begins."""
    control_plane: BlockTables | None = None
    """The store of block tables for brokered handshakes: a ControlPlaneClient."""
    on_offer: Callable[[Ticket], None] | None = None
    """Called for each OFFER that comes before its prefill request, for a worker whose requests have
    no ticket; prefill_session() or decline() with the ticket answers it."""
    tracer: Tracer | None = None
    """The tracer of transfers whose ticket names a trace. Those that begin in a traced task have
    spans anyway."""
    clock: Clock = SYSTEM_CLOCK
    """The clock; it has to advance as the loop's time does."""

    def __post_init__(self) -> None:
        check_bounds(self)
