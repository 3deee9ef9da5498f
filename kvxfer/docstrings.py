"""The texts below the members of a class, which describe each of them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path


@cache
def docstrings(cls: type) -> Mapping[str, str]:
    """Returns the texts of a class and its bases, by member name."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ in ("builtins", "msgspec") or "__annotations__" not in vars(base):
            continue
        for member, below in pairwise(_definition(base).body):
            match member, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    said[name] = " ".join(text.split())
    return said


def _definition(cls: type) -> ast.ClassDef:
    for statement in _module(inspect.getfile(cls)).body:
        if isinstance(statement, ast.ClassDef) and statement.name == cls.__qualname__:
            return statement
    raise TypeError(f"{cls} is not defined at the top of its module")


@cache
def _module(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))
