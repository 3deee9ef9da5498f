"""Settings from KVXFER_* variables, as SGLang has no options for its backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvxfer.cluster_key import read_cluster_key
from kvxfer.connectors.transfer_engine import DEFAULT_LEASE_SECONDS, EngineSettings
from kvxfer.engine.operator_options import OPERATOR_OPTIONS, parse_options
from kvxfer.errors import InvalidArgument
from kvxfer.ticket import watch_ticket_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings(EngineSettings):
    """The settings of one SGLang instance."""

    checkpoint: str | None = None
    """A name for the weights, compared instead of their digest."""
    control_plane: str | None = None
    """The control plane at which the instance registers; None leaves it to SGLang's router alone.
    """

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads the settings. Raises InvalidArgument, which names the variable."""
        key_file = environment.get("KVXFER_CLUSTER_KEY_FILE")
        ticket_keys_file = environment.get("KVXFER_TICKET_KEYS_FILE")
        options = parse_options(
            {name: environment.get(_variable(name)) for name in OPERATOR_OPTIONS}, _variable
        )
        return cls(
            cluster_key=read_cluster_key(Path(key_file) if key_file else None),
            ticket_keys=watch_ticket_keys(Path(ticket_keys_file)) if ticket_keys_file else None,
            options=options,
            lease_seconds=_seconds(environment, "KVXFER_LEASE_SECONDS", DEFAULT_LEASE_SECONDS),
            checksums=_flag(environment, "KVXFER_CHECKSUMS"),
            checkpoint=environment.get("KVXFER_CHECKPOINT") or None,
            control_plane=environment.get("KVXFER_CONTROL_PLANE") or None,
        )


def _variable(option: str) -> str:
    return f"KVXFER_{option.upper()}"


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name) or default
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise InvalidArgument(f"{name} is {value!r}; pass seconds above 0, below an hour")
    return seconds


def _flag(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name) or "0"
    if value not in ("0", "1"):
        raise InvalidArgument(f"{name} is {value!r}; pass 1 or 0")
    return value == "1"
