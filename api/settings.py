"""What an operator can set about the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvxfer.cluster_key import as_cluster_key
from kvxfer.settings import Seconds, check_bounds

if TYPE_CHECKING:
    from kvxfer.ticket import TicketKeys
    from kvxfer.watched_file import WatchedFile
    from kvxfer.web.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations are in seconds. Raises InvalidArgument for what cannot be meant."""

    cluster_key: bytes = field(repr=False)
    """The same for control plane and workers; signs the tickets where no ticket keys are given."""
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    """The first of them signs the tickets."""
    tokens: WatchedFile[Tokens] | None = field(default=None, repr=False)
    """The callers and their scopes; None lets every caller do everything."""
    transfer_seconds: Seconds = 60.0
    """How long a ticket is valid and its reservation counts."""
    weight_update_seconds: Seconds = 15.0
    """A weight update whose coordinator reports nothing for this long ends."""
    max_waiting: Annotated[int, Meta(ge=0)] = 10_000
    """Requests that wait for a pair at one replica; of one more the tenant with the most waiting
    loses its last."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """The tenants that requests wait for in turn, and their weights."""
    rate_limit: Annotated[float, Meta(ge=0)] = 2000.0
    """Requests per second of one token at one address, and as many at once, without heartbeats; 0
    is no limit."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 1 << 20
    """Of a request; block tables may have 1.5 MiB."""
    keepalive_seconds: Seconds = 15.0
    """Silence on a watch after which a comment is sent, so that no proxy cuts the stream."""
    sweep_seconds: Seconds = 0.5
    """How late a watcher may learn that a lease expired."""
    retry_after_seconds: Annotated[int, Meta(ge=1)] = 1
    """What the Retry-After header of a 503 says."""

    def __post_init__(self) -> None:
        as_cluster_key(self.cluster_key)
        check_bounds(self)

    @property
    def signing_keys(self) -> TicketKeys:
        """What signs the tickets now."""
        if self.ticket_keys is not None:
            return self.ticket_keys.current
        from kvxfer.ticket import derived_ticket_keys

        return derived_ticket_keys(self.cluster_key)
