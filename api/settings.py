"""What an operator can set about the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import InvalidArgument
from kvxfer.ticket import TicketKeys, derived_ticket_keys
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
    """Who may call what; None lets everybody do everything."""
    rate_limit: float = 2000.0
    """Requests per second of one token at one address, and as many at once; 0 is no limit."""
    max_body_bytes: int = 1 << 20
    transfer_seconds: float = 60.0
    """How long a ticket is valid and its reservation counts."""
    keepalive_seconds: float = 15.0
    """Silence on a watch after which a comment is sent, so that no proxy cuts the stream."""
    sweep_seconds: float = 0.5
    """How late a watcher may learn that a lease expired."""
    retry_after_seconds: int = 1
    """What the Retry-After header of a 503 says."""

    def __post_init__(self) -> None:
        as_cluster_key(self.cluster_key)
        for name in (
            "transfer_seconds",
            "keepalive_seconds",
            "sweep_seconds",
            "retry_after_seconds",
            "max_body_bytes",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidArgument(f"{name} is {value}; pass a number greater than 0")
        if not self.rate_limit >= 0:
            raise InvalidArgument(
                f"rate_limit is {self.rate_limit}; pass a number greater than 0, or 0 for none"
            )

    @property
    def signing_keys(self) -> TicketKeys:
        """What signs the tickets now."""
        if self.ticket_keys is not None:
            return self.ticket_keys.current
        return derived_ticket_keys(self.cluster_key)
