"""The transfer engine and the KV endpoint of one worker, as the settings of its connector say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.engine import Engine
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.rendezvous import OnOffer
from kvxfer.ticket import TicketKeys, as_ticket_keys
from kvxfer.watched_file import WatchedFile

if TYPE_CHECKING:
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.tracing.tracer import Tracer

DEFAULT_LEASE_SECONDS: Final = 30.0
DEFAULT_PEER_TIMEOUT: Final = 0.7

MakeCache = Callable[[Engine], KvCache]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an operator sets in every connector."""

    host: str = "127.0.0.1"
    """Where the transfer engine listens, and the other side finds it."""
    cluster_key: bytes = field(repr=False)
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    fabrics: tuple[str, ...] | None = None
    cpus: tuple[int, ...] = ()
    """Where the transfer engine's thread may run; empty lets it run where its process may."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """How long a side waits for the other."""
    peer_timeout: float = DEFAULT_PEER_TIMEOUT
    """Seconds without a heartbeat after which the other side counts as frozen."""
    checksums: bool = False
    """Every transfer is checked by a checksum of its blocks, whatever the other side's setting."""

    @property
    def keys(self) -> TicketKeys:
        """The keys of tickets as they are now."""
        if self.ticket_keys is None:
            return as_ticket_keys(self.cluster_key)
        return self.ticket_keys.current


@contextlib.asynccontextmanager
async def transfer_engine(
    settings: EngineSettings,
    make_cache: MakeCache,
    *,
    instance_id: str,
    epoch: int = 0,
    model: ModelIdentity | None = None,
    on_offer: OnOffer | None = None,
    tracer: Tracer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[tuple[Engine, KvCache, KvEndpoint]]:
    """They belong to the loop that enters this, and end when it is left."""
    engine = Engine(
        cluster_key=settings.cluster_key,
        name=instance_id,
        host=settings.host,
        fabrics=settings.fabrics,
        cpus=settings.cpus,
        peer_timeout=settings.peer_timeout,
    )
    async with engine:
        with make_cache(engine) as cache:
            endpoint = KvEndpoint(
                engine,
                cache,
                None,
                instance_id=instance_id,
                epoch=epoch,
                ticket_key=settings.ticket_keys or settings.cluster_key,
                lease_seconds=settings.lease_seconds,
                # A frozen worker does not answer either.
                connect_timeout=settings.peer_timeout,
                on_offer=on_offer,
                checksums=settings.checksums,
                tracer=tracer,
                model=model,
                clock=clock,
            )
            async with endpoint:
                yield engine, cache, endpoint
