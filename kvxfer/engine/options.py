"""The options of an engine, described. engine_native/include/kvxfer/types.hpp defines them, with
their defaults."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Sequence
from typing import Final, TypedDict

from kvxfer.docstrings import docstrings
from kvxfer.engine.native import native
from kvxfer.errors import InvalidArgument

FABRICS: Final = ("local", "verbs", "ofi", "tcp")
DEFAULT_PEER_TIMEOUT: Final = native.DEFAULT_PEER_TIMEOUT


class EngineOptions(TypedDict, total=False):
    """The options of `Engine`, for programs that pass them on. One that is left out has its
    default. `Engine` raises InvalidArgument for an unknown one, and for a wrong value."""

    name: str
    """Name of the engine in the errors and the `peer.name` of its peers: up to 128 bytes, which
    need not be unique. Empty by default."""

    host: str
    """Numeric address to listen on; 127.0.0.1 by default."""

    advertise: str | None
    """Numeric address to give to peers; None, the default, gives them `host`."""

    port: int
    """TCP port to listen on; 0, the default, takes any free one."""

    fabrics: Sequence[str] | None
    """Fabrics that may be used. With each peer the engine uses the first in the order of FABRICS
    that both sides have. Raises FabricUnavailable if a named one is not available. None, the
    default, uses all that this host has."""

    nics: Sequence[str]
    """Names of the NICs to use, such as "mlx5_0", or "mlx5_0:2" for a device's second port. Raises
    FabricUnavailable for one that this host does not have. Empty, the default, uses all, by their
    first ports. If the names differ from a peer's, the order matches NICs with the peer's.
    `kvxfer.topology.local_group()` chooses those near a GPU."""

    cpus: Sequence[int]
    """Cores that the engine's thread may run on; empty, the default, allows all.
    `kvxfer.topology.local_group()` chooses those near a GPU."""

    traffic_class: int
    """Traffic class of verbs packets, 0 to 255, 0 by default: DSCP << 2 | ECN on RoCE.
    docs/nics.md says what to set."""

    service_level: int
    """Service level of verbs packets, 0 to 7, 0 by default: the priority on RoCE."""

    gid_index: int
    """Index of the GID that a verbs port uses: 0 to 255; -1, the default, chooses by address: of
    this network namespace, RoCE v2, IPv4."""

    pkey: int
    """Partition of an InfiniBand port to use, with or without its membership bit, such as 0x8012;
    0, the default, takes the first in which the port is a full member. NICs of other partitions are
    not reached."""

    path_mtu: int
    """Bytes of a verbs packet: 256, 512, 1024, 2048 or 4096, at most the port's; 0, the default,
    takes the port's."""

    memory_windows: bool
    """Whether verbs NICs restrict a peer to the ranges that it was granted, by a memory window for
    each path and range of up to 2 GiB. True by default. If False, the peer gets the region's key,
    and its first write waits for nothing. docs/security.md explains the difference."""

    paths_per_nic_pair: int
    """Queue pairs between two NICs: 1 to 8, 1 by default. Each is a separate flow, which ECMP and
    LAG may route differently."""

    ofi_provider: str
    """libfabric's name of the provider; "efa" by default."""

    ofi_endpoints: int
    """NICs that each libfabric domain stands for: 1 to 64, 1 by default."""

    ofi_strict: bool
    """Whether any provider is held to EFA's limits and disorder, for tests; False by default."""

    lanes: int
    """TCP connections per peer: 1 to 64, 2 by default."""

    window_bytes: int
    """Unacknowledged bytes per peer over tcp: at least 1 MiB, 16 MiB by default."""

    heartbeat_interval: float
    """Seconds between heartbeats, 0.001 to 60; 0.1 by default."""

    peer_timeout: float
    """Seconds of silence after which a peer is lost: at least twice `heartbeat_interval`, 0.7 by
    default."""

    path_timeout: float
    """Seconds without a delivery, while writes are under way, after which a NIC's path is closed
    and they take another path: at least `heartbeat_interval`, 1 by default."""

    operation_timeout: float
    """Deadline in seconds of operations without one: above 0, 30 by default."""

    spin: float
    """Seconds of busy polling after the last progress, before the thread sleeps; 200e-6 by
    default."""


def _described() -> str:
    """Returns the text of help(), with the texts of the members, which Python does not keep."""
    texts = (f"{name}: {text}" for name, text in docstrings(EngineOptions).items())
    return "\n\n".join(
        [
            inspect.cleandoc(EngineOptions.__doc__ or ""),
            *(textwrap.fill(text, 92, subsequent_indent="    ") for text in texts),
        ]
    )


EngineOptions.__doc__ = _described()


def native_options(given: EngineOptions) -> dict[str, object]:
    """Returns the native engine's options. Raises InvalidArgument for an unknown option, and names
    a similar one."""
    for name in given.keys() - EngineOptions.__optional_keys__:
        near = difflib.get_close_matches(name, EngineOptions.__optional_keys__, n=1)
        meant = f"did you mean {near[0]!r}?" if near else "help(kvxfer.EngineOptions) lists them"
        raise InvalidArgument(f"Engine has no option {name!r}; {meant}")
    return {
        **native_fabrics(given.get("fabrics")),
        **{name: value for name, value in given.items() if name != "fabrics"},
    }


def native_fabrics(fabrics: Sequence[str] | None) -> dict[str, bool | str]:
    """Returns the native options that `fabrics` stands for. Raises InvalidArgument."""
    named = FABRICS if fabrics is None else fabrics
    if isinstance(named, str | bytes) or not isinstance(named, Sequence):
        raise InvalidArgument(f"fabrics is {named!r}; pass a list of names, such as ['tcp']")
    if not named or any(fabric not in FABRICS for fabric in named):
        raise InvalidArgument(
            f"fabrics is {list(named)!r}; choose from {', '.join(FABRICS)}, at least one"
        )
    use = "if_available" if fabrics is None else "required"
    return {
        "local": "local" in named,
        "tcp": "tcp" in named,
        "verbs": use if "verbs" in named else "never",
        "ofi": use if "ofi" in named else "never",
    }
