"""Every type in a signature of the public API can be imported from it."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_args

import pytest

from tests.docs.test_public_names import PUBLIC, names_of

CHECKED = ("kvxfer.kv", "kvxfer.client", "kvxfer.moe", "kvxfer.weights")
# Only programs of this tree pass it; users configure tracing by the environment.
NOT_FOR_USERS = {"kvxfer.tracing.tracer.Tracer"}


@cache
def exported() -> list[Any]:
    return [
        getattr(importlib.import_module(module), name)
        for module in PUBLIC
        for name in names_of(module)
    ]


@cache
def imports_for_types(module: ModuleType) -> dict[str, Any]:
    """Returns the names that the module imports if TYPE_CHECKING is true."""
    assert module.__file__ is not None
    return {
        each.asname or each.name: getattr(importlib.import_module(node.module), each.name)
        for block in ast.parse(Path(module.__file__).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for each in node.names
    }


def functions(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yields the methods and properties for users. A session is made by its endpoint."""
    made_elsewhere = "Made by" in (inspect.getdoc(cls) or "")
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if name.startswith("_") and (name != "__init__" or made_elsewhere):
                continue
            found = member.fget if isinstance(member, property) else inspect.unwrap(member)
            found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if isinstance(found, FunctionType) and found.__module__.startswith("kvxfer."):
                yield f"{cls.__name__}.{name}", found


def named(annotation: Any, module: ModuleType) -> Iterator[Any]:
    """Yields the objects that the names of an annotation stand for."""
    if not isinstance(annotation, str):
        yield annotation
        return
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        if isinstance(node, ast.Name):
            places = (vars(builtins), imports_for_types(module), vars(module))
            [*found] = (place[node.id] for place in places if node.id in place)
            assert found, f"{node.id} is not imported"
            yield found[0]


def not_public(value: Any) -> Iterator[str]:
    """Yields the classes of kvxfer in a type that are not public."""
    if args := get_args(value):
        for each in args:
            yield from not_public(each)
    elif inspect.isclass(value) and value.__module__.startswith("kvxfer."):
        name = f"{value.__module__}.{value.__qualname__}"
        if not any(value is each for each in exported()) and name not in NOT_FOR_USERS:
            yield name


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, id=f"{module}.{name}")
        for module in CHECKED
        for name in names_of(module)
        if inspect.isclass(value := getattr(importlib.import_module(module), name))
        or inspect.isfunction(value)
    ],
)
def test_types_of_signatures_are_public(value: Any) -> None:
    found = functions(value) if inspect.isclass(value) else [(value.__name__, value)]
    missing = {
        (where, parameter, name)
        for where, function in found
        for parameter, annotation in function.__annotations__.items()
        for each in named(annotation, sys.modules[function.__module__])
        for name in not_public(each)
    }
    assert not missing
