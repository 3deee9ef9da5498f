"""The options that an operator sets for the engine of each rank: read from JSON or from text, and
completed with the NICs nearest to the rank's memory.

`EngineOptions` declares them, so a new option can be set everywhere without another line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from kvxfer.engine.native import native, translated
from kvxfer.engine.options import FABRICS, EngineOptions, native_fabrics
from kvxfer.errors import InvalidArgument
from kvxfer.topology import Sysfs, choose_nics, closed_nics, read_topology


class OperatorOptions(EngineOptions, total=False):
    """The options that an operator may set. Also in `nics`, a trailing * stands for any rest."""

    exclude_nics: Sequence[str]
    """Names of NICs never to use; a trailing * stands for any rest: "mlx5_8", "mlx5_bond*"."""


# Each rank's engine has its own name and port.
_NOT_SET: Final = ("name", "port")
_TYPES: Final[Mapping[str, Any]] = {
    name: hint for name, hint in get_type_hints(OperatorOptions).items() if name not in _NOT_SET
}
OPERATOR_OPTIONS: Final = tuple(_TYPES)
"""The names of OperatorOptions that can be set."""

_WORDS: Final = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_NIC_FABRICS: Final = ("verbs", "ofi")


def read_options(given: Mapping[str, object], setting: Callable[[str], str]) -> OperatorOptions:
    """Returns those of OPERATOR_OPTIONS that are in `given`, as JSON values; None and empty values
    count as left out. `setting` returns the operator's name for an option. Raises InvalidArgument,
    which names the setting."""
    return _options(given, setting, _of_json)


def parse_options(
    given: Mapping[str, str | None], setting: Callable[[str], str]
) -> OperatorOptions:
    """Returns the same as `read_options`, from text: lists have commas between their items."""
    return _options(given, setting, _of_text)


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
    given: Mapping[str, Any],
    setting: Callable[[str], str],
    convert: Callable[[Any, Any, bool], Any],
) -> OperatorOptions:
    options: dict[str, Any] = {}
    for name in OPERATOR_OPTIONS:
        value = given.get(name)
        if value is None or value in ("", [], ()):
            continue
        called = setting(name)
        scalar, listed = _kind(_TYPES[name])
        try:
            taken = convert(value, scalar, listed)
        except msgspec.ValidationError:
            takes = _WORDS[scalar]
            raise InvalidArgument(
                f"{called} is {value!r}; pass {f'a list, each item {takes}' if listed else takes}"
            ) from None
        try:
            _check(name, taken)
        except InvalidArgument as error:
            raise InvalidArgument(f"{called} is refused: {error}") from None
        options[name] = taken
    return cast("OperatorOptions", options)


def _of_json(value: object, scalar: Any, listed: bool) -> Any:
    return msgspec.convert(value, list[scalar] if listed else scalar)


def _of_text(value: str, scalar: Any, listed: bool) -> Any:
    if not listed:
        return msgspec.convert(value.strip(), scalar, strict=False)
    parts = [part.strip() for part in value.split(",")]
    return msgspec.convert([part for part in parts if part], list[scalar], strict=False)


def _check(name: str, value: Any) -> None:
    """Raises InvalidArgument for a value that no engine accepts. The engine checks the rest."""
    if name == "exclude_nics":
        return
    options = native_fabrics(value) if name == "fabrics" else {name: value}
    with translated():
        native.EngineOptions(**options)


def _kind(hint: Any) -> tuple[Any, bool]:
    """Returns the type of an option, or of its items, and whether it is a list."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (Union, UnionType):
        return _kind(next(each for each in arguments if each is not type(None)))
    if origin is Sequence:
        return arguments[0], True
    return hint, False
