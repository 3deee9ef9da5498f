"""Settings from kv_connector_extra_config, and from KVXFER_* variables for the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Self

from msgspec import Meta

from kvxfer.addresses import HTTP_FORM, host_and_port, require_address
from kvxfer.cluster_key import read_cluster_key
from kvxfer.connectors.transfer_engine import DEFAULT_HOST, EngineSettings
from kvxfer.engine.operator_options import read_options
from kvxfer.errors import InvalidArgument
from kvxfer.instances import Role
from kvxfer.settings import read_members
from kvxfer.ticket import watch_ticket_keys

_ROLES: Final = {
    "kv_producer": Role.PREFILL,
    "kv_consumer": Role.DECODE,
    "kv_both": Role.BOTH,
}
WHOLE_BLOCKS: Final = "whole_blocks"
_READ: Final = ("checkpoint", "lease_seconds", "checksums", WHOLE_BLOCKS)
_BESIDE: Final = frozenset(
    {
        "instance_id",
        "http_address",
        "http_port",
        "control_plane",
        "cluster_key_file",
        "ticket_keys_file",
        "labels",
        *_READ,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(EngineSettings):
    """The settings of one vLLM instance."""

    role: Role
    instance_id: str
    model: str
    http_address: str
    """The address at which the router finds this instance's API."""
    control_plane: str | None = None
    checkpoint: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """A name for the weights, compared instead of their digest."""
    whole_blocks: bool = False
    """Whether all layers of a block are one write."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, role: str, engine_id: str, model: str) -> Self:
        """Reads the settings. Raises InvalidArgument, which names the setting."""
        key_file, tickets = extra.get("cluster_key_file"), extra.get("ticket_keys_file")
        setting = "kv_connector_extra_config.{}".format
        options = read_options(extra, setting, _BESIDE)
        options.setdefault("host", os.environ.get("KVXFER_HOST") or DEFAULT_HOST)
        return cls(
            role=_ROLES[role],
            instance_id=extra.get("instance_id") or engine_id,
            model=model,
            http_address=_http_address(extra, options.get("advertise") or options["host"]),
            control_plane=extra.get("control_plane"),
            cluster_key=read_cluster_key(Path(key_file) if key_file else None),
            ticket_keys=watch_ticket_keys(Path(tickets)) if tickets else None,
            options=options,
            labels=dict(extra.get("labels") or {}),
            **read_members(cls, {name: extra.get(name) for name in _READ}, setting),
        )


def _http_address(extra: Mapping[str, Any], host: str) -> str:
    """Returns the address at which the router finds the server: a given one, or a port of the
    transfer engine's host. Variables apply if the settings have neither."""
    names = ("kv_connector_extra_config.http_address", "kv_connector_extra_config.http_port")
    address, port = extra.get("http_address") or None, extra.get("http_port")
    if address is None and port is None:
        names = ("KVXFER_HTTP_ADDRESS", "KVXFER_HTTP_PORT")
        address, port = (os.environ.get(name) or None for name in names)
    if address is not None and port is not None:
        raise InvalidArgument(
            f"{names[0]} is {address!r} and {names[1]} is {port!r}; set one of them"
        )
    if address is not None:
        address = str(address).rstrip("/")
        require_address(names[0], address, HTTP_FORM)
        return address
    if port is None:
        raise InvalidArgument(
            "kv_connector_extra_config.http_address is missing: set it, or KVXFER_HTTP_ADDRESS, to "
            "where the router finds this server, such as http://10.0.0.7:8000; or set http_port, "
            "or KVXFER_HTTP_PORT, to its port if it is found at `host`"
        )
    number = int(port) if str(port).isdecimal() else 0
    if not 0 < number < 65536:
        raise InvalidArgument(f"{names[1]} is {port!r}; pass a port, 1 to 65535")
    address = f"http://{host_and_port(host, number)}"
    require_address(f"the address of {names[1]} and `host`", address, HTTP_FORM)
    return address
