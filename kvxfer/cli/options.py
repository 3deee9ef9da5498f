"""Options that follow from settings: a command takes a dataclass, typer sees an option per member.

A member becomes `--its-name`, with its type, its default, the bounds of its `msgspec.Meta`, and the
text below it as help. What only the command line needs (an environment variable, a panel) is a
`typer.Option` in the member's annotation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from typing import Annotated, Any, Final, get_args

import msgspec
import typer
from typer.models import OptionInfo

from kvxfer.docstrings import docstrings
from kvxfer.settings import Member, fields, members

# typer has no gt and lt: the settings themselves refuse values beyond them.
_BOUNDS: Final = {"ge": "min", "le": "max"}
_MISSING: Final = (dataclasses.MISSING, msgspec.NODEFAULT)
_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


class OptionsOf:
    """A mark for a parameter `dict[str, Any]`: it gets option values for a settings class, which
    the command makes from these and from others.

    `without` names members that are no options. `special` has the options of some members; the
    others are in `panel`.
    """

    def __init__(
        self, cls: type, *, without: tuple[str, ...] = (), panel: str | None = None, **special: Any
    ) -> None:
        self.defaults = {e.name: e.default for e in fields(cls) if e.name not in without}
        self._cls, self._special = cls, special
        self._usual = typer.Option(rich_help_panel=panel)

    def parameters(self) -> Iterator[inspect.Parameter]:
        known = members(self._cls)
        for name, default in self.defaults.items():
            option = self._option(name, known[name])
            yield inspect.Parameter(
                name,
                _KEYWORD,
                default=inspect.Parameter.empty if default in _MISSING else default,
                annotation=Annotated[known[name].type, option],
            )

    def _option(self, name: str, member: Member) -> OptionInfo:
        beside = (note for note in member.notes if isinstance(note, OptionInfo))
        option = copy(self._special.get(name) or next(beside, self._usual))
        option.help = docstrings(self._cls)[name]
        for bound, limit in member.bounds:
            if bound in _BOUNDS:
                setattr(option, _BOUNDS[bound], limit)
        if member.type is bool and option.default is ...:  # without --no-...
            option.param_decls = (f"--{name.replace('_', '-')}",)
        return option


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command as typer takes it: options replace each parameter that is a dataclass,
    which is made from them, or that OptionsOf marks."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[OptionsOf, Callable[..., Any]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if group := _group(parameter.annotation):
            groups[parameter.name] = group
            parameters += group[0].parameters()
        else:
            parameters.append(parameter.replace(kind=_KEYWORD))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (options, make) in groups.items():
            given[name] = make(**{each: given.pop(each) for each in options.defaults})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _group(kind: Any) -> tuple[OptionsOf, Callable[..., Any]] | None:
    """Returns the options that a parameter stands for, and the function that makes its value."""
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
        return OptionsOf(kind), kind
    return next(((note, dict) for note in get_args(kind)[1:] if isinstance(note, OptionsOf)), None)
