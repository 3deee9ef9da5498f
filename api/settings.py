"""What an operator can set about the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Durations are in seconds. Raises InvalidArgument for what cannot be meant."""

    cluster_key: bytes = field(repr=False)
    """Signs the tickets; the same for control plane and workers."""
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
        ):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidArgument(f"{name} is {value}; pass a number greater than 0")
