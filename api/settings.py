"""The control plane's settings."""

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
    """The settings of a control plane; durations are in seconds. Raises InvalidArgument for an
    invalid value."""

    cluster_key: bytes = field(repr=False)
    """The key that control plane and workers share; it signs tickets if there are no ticket keys.
    """
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    """The keys of tickets; the first one signs."""
    tokens: WatchedFile[Tokens] | None = field(default=None, repr=False)
    """The callers and their scopes; None lets every caller do everything."""
    transfer_seconds: Seconds = 60.0
    """The time for which a ticket is valid and its reservation counts."""
    weight_update_seconds: Seconds = 15.0
    """A weight update whose coordinator reports nothing for this long ends."""
    max_waiting: Annotated[int, Meta(ge=0)] = 10_000
    """The most requests that wait for a pair at one replica; one more removes the last request of
    the tenant with the most waiting."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """The weights of the tenants, which take turns when requests wait."""
    rate_limit: Annotated[float, Meta(ge=0)] = 2000.0
    """The most requests per second of one token at one address, and as many at once; heartbeats do
    not count. 0 is no limit."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 1 << 20
    """The largest body of a request, in bytes; block tables may have 1.5 MiB."""

    def __post_init__(self) -> None:
        as_cluster_key(self.cluster_key)
        check_bounds(self)

    @property
    def signing_keys(self) -> TicketKeys:
        """The keys that sign tickets now."""
        if self.ticket_keys is not None:
            return self.ticket_keys.current
        from kvxfer.ticket import derived_ticket_keys

        return derived_ticket_keys(self.cluster_key)
