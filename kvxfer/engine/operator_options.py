"""The options that an operator sets for the engine of each rank: read from JSON or from text, and
completed with the NICs nearest to the rank's memory.

`EngineOptions` declares them, so a new option can be set everywhere without another line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast, get_type_hints

from kvxfer.engine.native import native, translated
from kvxfer.engine.options import FABRICS, EngineOptions, EngineTuning, native_fabrics
from kvxfer.errors import InvalidArgument
from kvxfer.settings import Member, member_of, read
from kvxfer.topology import Sysfs, choose_nics, closed_nics, read_topology


class OperatorOptions(EngineOptions, total=False):
    """The options that an operator may set. Also in `nics`, a trailing * stands for any rest."""

    exclude_nics: Sequence[str]
    """Names of NICs never to use; a trailing * stands for any rest: "mlx5_8", "mlx5_bond*"."""


# Each rank's engine has its own name and port.
_NOT_SET: Final = ("name", "port", "tuning")
_MEMBERS: Final[Mapping[str, Member]] = {
    name: member_of(hint)
    for prefix, cls in (("", OperatorOptions), ("tuning.", EngineTuning))
    for option, hint in get_type_hints(cls, include_extras=True).items()
    if (name := prefix + option) not in _NOT_SET
}
OPERATOR_OPTIONS: Final = tuple(_MEMBERS)
"""The names of OperatorOptions that can be set: "nics", "tuning.lanes"."""
JSON_OPTIONS: Final = frozenset(name.partition(".")[0] for name in OPERATOR_OPTIONS)
"""The same as members of a JSON object: "nics", "tuning"."""

_NIC_FABRICS: Final = ("verbs", "ofi")


def read_options(
    given: Mapping[str, Any], setting: Callable[[str], str], beside: Collection[str] = ()
) -> OperatorOptions:
    """Returns the options in `given`, as JSON values; None and empty values count as left out.
    `setting` returns the operator's name for an option, and `beside` has the settings that are no
    options. Raises InvalidArgument, which names the setting, also for an unknown one."""
    tuning = given.get("tuning") or {}
    if not isinstance(tuning, Mapping):
        raise InvalidArgument(
            f'{setting("tuning")} is {tuning!r}; pass an object, such as {{"lanes": 4}}'
        )
    named = {name: value for name, value in given.items() if name not in ("tuning", *beside)}
    named |= {f"tuning.{name}": value for name, value in tuning.items()}
    return _options(named, setting, {*OPERATOR_OPTIONS, *beside}, text=False)


def parse_options(
    given: Mapping[str, str | None], setting: Callable[[str], str]
) -> OperatorOptions:
    """Returns the same as `read_options`, from text by OPERATOR_OPTIONS: lists have commas between
    their items."""
    return _options(given, setting, OPERATOR_OPTIONS, text=True)


def engine_options(
    given: OperatorOptions,
    gpu: str | None,
    log: logging.Logger,
    *,
    root: Path = Path("/"),
    running_on: Collection[int] | None = None,
) -> EngineOptions:
    """Returns the options of `Engine`, with the NICs nearest to the GPU at a PCI address, or with
    None to the NUMA nodes that this process may run on (`kvxfer.topology.choose_nics`). Logs their
    names, and why the others are left out.

    Raises InvalidArgument if `nics`, `exclude_nics` and `fabrics` contradict each other.
    """
    options = {name: value for name, value in given.items() if name != "exclude_nics"}
    fabrics = given.get("fabrics")
    usable = [
        name
        for name in _NIC_FABRICS
        if name in native.BUILT_FABRICS and (fabrics is None or name in fabrics)
    ]
    if given.get("ofi_provider", "efa") != "efa":  # the provider's NICs are not in /sys
        return cast("EngineOptions", options)
    # The cores of the main thread, as this thread may not be bound to the cores of its rank.
    cpus = os.sched_getaffinity(os.getpid()) if running_on is None else running_on
    exclude = given.get("exclude_nics", ())
    choice = choose_nics(
        read_topology(Sysfs.below(root)),
        gpu,
        running_on=cpus,
        allow=given.get("nics", ()),
        exclude=exclude,
        fabrics=usable,
        closed=closed_nics(root),
    )
    log.info("%s", choice)
    options.pop("nics", None)
    if choice.names:
        options["nics"] = list(choice.names)
    elif choice.names is not None:
        needed = [name for name in _NIC_FABRICS if fabrics is not None and name in fabrics]
        if needed:
            raise InvalidArgument(
                f"exclude_nics {list(exclude)} leaves no NIC of this host, and fabrics names "
                f"{', '.join(needed)}; exclude fewer, or leave that fabric out"
            )
        options["fabrics"] = [name for name in fabrics or FABRICS if name not in _NIC_FABRICS]
    return cast("EngineOptions", options)


def _options(
    given: Mapping[str, Any], setting: Callable[[str], str], known: Collection[str], *, text: bool
) -> OperatorOptions:
    options: dict[str, Any] = {}
    for name, value in given.items():
        if text and not value:
            continue
        if name not in known:
            remedy = (
                f"set {setting(f'tuning.{name}')}"
                if f"tuning.{name}" in known
                else f"there are {', '.join(sorted(known))}"
            )
            raise InvalidArgument(f"{setting(name)} is no setting of kvxfer; {remedy}")
        if value is None or value in ("", [], ()):
            continue
        called = setting(name)
        option = _nested(name, read(value, _MEMBERS[name], called, text=text))
        try:
            _check(option)
        except InvalidArgument as error:
            raise InvalidArgument(f"{called} is refused: {error}") from None
        if "tuning" in option:
            option = {"tuning": {**options.get("tuning", {}), **option["tuning"]}}
        options |= option
    return cast("OperatorOptions", options)


def _nested(name: str, value: object) -> dict[str, Any]:
    of, _, tuning = name.partition(".")
    return {of: {tuning: value} if tuning else value}


def _check(option: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for a value that no engine accepts. The engine checks the rest."""
    if "exclude_nics" in option:
        return
    options = native_fabrics(option["fabrics"]) if "fabrics" in option else option
    with translated():
        native.EngineOptions(**options)
