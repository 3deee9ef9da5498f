"""Settings from KVXFER_* variables, as SGLang has no options for its backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvxfer.cluster_key import read_cluster_key
from kvxfer.connectors.transfer_engine import EngineSettings
from kvxfer.engine.operator_options import OPERATOR_OPTIONS, parse_options
from kvxfer.engine.options import EngineTuning
from kvxfer.settings import read_members
from kvxfer.ticket import watch_ticket_keys

_READ: Final = ("checkpoint", "lease_seconds", "checksums")
# With those of tuning alone, so that parse_options() refuses them.
_NAMES: Final = (*OPERATOR_OPTIONS, *EngineTuning.__optional_keys__)


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
            {name: environment.get(_variable(name)) for name in _NAMES}, _variable
        )
        return cls(
            cluster_key=read_cluster_key(Path(key_file) if key_file else None),
            ticket_keys=watch_ticket_keys(Path(ticket_keys_file)) if ticket_keys_file else None,
            options=options,
            control_plane=environment.get("KVXFER_CONTROL_PLANE") or None,
            **read_members(
                cls,
                {name: environment.get(_variable(name)) for name in _READ},
                _variable,
                text=True,
            ),
        )


def _variable(setting: str) -> str:
    return f"KVXFER_{setting.upper().replace('.', '_')}"
