"""The options of an engine, described. The native engine has their defaults and bounds
(engine_native/src/engine_options.cpp)."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypedDict

from kvxfer.docstrings import docstrings
from kvxfer.engine.native import native
from kvxfer.errors import InvalidArgument

FABRICS: Final = ("local", "verbs", "ofi", "tcp")
DEFAULT_PEER_TIMEOUT: Final[float] = native.ENGINE_OPTIONS["peer_timeout"][0]


class EngineTuning(TypedDict, total=False):
    """Options of `Engine` that few programs set: `EngineOptions.tuning`."""

    lanes: int
    """TCP connections per peer."""

    window_bytes: int
    """Unacknowledged bytes per peer over tcp."""

    heartbeat_interval: float
    """Seconds between heartbeats."""

    path_timeout: float
    """Seconds without a delivery, while writes are under way, after which a NIC's path is closed
    and they take another path: at least `heartbeat_interval`."""

    spin: float
    """Seconds of busy polling after the last progress, before the thread sleeps."""

    service_level: int
    """Service level of verbs packets: the priority on RoCE. docs/nics.md says what to set."""

    path_mtu: int
    """Bytes of a verbs packet: a power of 2, at most the port's MTU, which 0 stands for."""

    memory_windows: bool
    """Whether verbs NICs restrict a peer to the ranges that it was granted, by a memory window for
    each path and range of up to 2 GiB. If False, the peer gets the region's key, and its first
    write waits for nothing. docs/security.md explains the difference."""

    paths_per_nic_pair: int
    """Queue pairs between two NICs. Each is a separate flow, which ECMP and LAG may route
    differently."""

    ofi_endpoints: int
    """NICs that each libfabric domain stands for."""


class EngineOptions(TypedDict, total=False):
    """The options of `Engine`, for programs that pass them on. One that is left out has its
    default. `Engine` raises InvalidArgument for an unknown one, and for a wrong value."""

    name: str
    """Name of the engine in the errors and the `peer.name` of its peers, which need not be
    unique."""

    host: str
    """Numeric address to listen on."""

    advertise: str | None
    """Numeric address to give to peers; if it is empty or None, they get `host`."""

    port: int
    """TCP port to listen on; 0 takes any free one."""

    fabrics: Sequence[str] | None
    """Fabrics that may be used. With each peer the engine uses the first in the order of FABRICS
    that both sides have. Raises FabricUnavailable if a named one is not available. None uses all
    that this host has."""

    nics: Sequence[str]
    """Names of the NICs to use, such as "mlx5_0", or "mlx5_0:2" for a device's second port. Raises
    FabricUnavailable for one that this host does not have. If it is empty, all are used, by their
    first ports. If the names differ from a peer's, the order matches NICs with the peer's.
    `kvxfer.topology.local_group()` chooses those near a GPU."""

    cpus: Sequence[int]
    """Cores that the engine's thread may run on; if it is empty, all.
    `kvxfer.topology.local_group()` chooses those near a GPU."""

    traffic_class: int
    """Traffic class of verbs packets: DSCP << 2 | ECN on RoCE. docs/nics.md says what to set."""

    gid_index: int
    """Index of the GID that a verbs port uses; -1 chooses by address: of this network namespace,
    RoCE v2, IPv4."""

    pkey: int
    """Partition of an InfiniBand port to use, with or without its membership bit, such as 0x8012; 0
    takes the first in which the port is a full member. NICs of other partitions are not reached."""

    ofi_provider: str
    """libfabric's name of the provider."""

    peer_timeout: float
    """Seconds of silence after which a peer is lost: at least twice `tuning.heartbeat_interval`."""

    operation_timeout: float
    """Deadline in seconds of operations without one."""

    tuning: EngineTuning
    """Options that few programs set: help(kvxfer.EngineTuning)."""


# For this project's tests: hold any provider of libfabric to EFA's limits and disorder.
_FOR_TESTS: Final = frozenset({"ofi_strict"})


_UNBOUNDED: Final = (None, None, None, "")


def default_of(name: str) -> str:
    """Returns the default of an option as text; one of EngineTuning is called "tuning.NAME"."""
    default, _, _, unit = native.ENGINE_OPTIONS.get(name, _UNBOUNDED)
    return _quantity(default, unit)


def bounds_of(name: str) -> str:
    """Returns the bounds of an option as text; empty if it has none."""
    default, least, most, unit = native.ENGINE_OPTIONS.get(name, _UNBOUNDED)
    if least is None or most is None:
        return ""
    if math.isinf(most):
        return f"{_quantity(least, unit)} or more"
    beside = f", or {default}" if isinstance(default, int) and default < least else ""
    return f"{_quantity(least, '')} to {_quantity(most, unit)}{beside}"


def _quantity(value: object, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return json.dumps(value) if isinstance(value, str) else str(value)
    if unit == "bytes" and value and value % (1 << 20) == 0:
        return f"{int(value) >> 20} MiB"
    if unit == "s" and 0 < value < 1e-3:
        return f"{value * 1e6:g} µs" if value >= 1e-6 else f"{value * 1e9:g} ns"
    return f"{value:g} {unit}".rstrip()


def _described(cls: type, prefix: str = "") -> str:
    """Returns the text of help(), with the texts of the members, which Python does not keep."""
    texts = []
    for name, text in docstrings(cls).items():
        facts = [f"Default: {default_of(prefix + name)}."] if name != "tuning" else []
        if bounds := bounds_of(prefix + name):
            facts.append(f"Bounds: {bounds}.")
        texts.append(" ".join([f"{name}: {text}", *facts]))
    return "\n\n".join(
        [
            inspect.cleandoc(cls.__doc__ or ""),
            *(textwrap.fill(text, 92, subsequent_indent="    ") for text in texts),
        ]
    )


EngineTuning.__doc__ = _described(EngineTuning, "tuning.")
EngineOptions.__doc__ = _described(EngineOptions)


def native_options(given: EngineOptions) -> dict[str, object]:
    """Returns the native engine's options. Raises InvalidArgument for an unknown option, and names
    a similar one."""
    _refuse_unknown(given, EngineOptions.__optional_keys__ | _FOR_TESTS)
    tuning = given.get("tuning", {})
    if not isinstance(tuning, Mapping):
        raise InvalidArgument(f"tuning is {tuning!r}; pass a dict, such as {{'lanes': 4}}")
    _refuse_unknown(tuning, EngineTuning.__optional_keys__, "tuning.")
    return {
        **native_fabrics(given.get("fabrics")),
        **{name: value for name, value in given.items() if name != "fabrics"},
        "tuning": dict(tuning),
    }


def _refuse_unknown(given: Mapping[str, object], known: Collection[str], prefix: str = "") -> None:
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        if name in EngineTuning.__optional_keys__:
            remedy = f'pass tuning={{"{name}": …}}'
        elif near:
            remedy = f"did you mean {near[0]!r}?"
        else:
            remedy = "help(kvxfer.EngineOptions) lists them"
        raise InvalidArgument(f"Engine has no option {prefix + name!r}; {remedy}")


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
