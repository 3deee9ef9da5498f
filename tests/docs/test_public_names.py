"""Documents and examples import public names only; every public name exists and is described."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError

ROOT = Path(__file__).parents[2]
PUBLIC = ("kvxfer", "kvxfer.client", "kvxfer.errors", "kvxfer.kv", "kvxfer.moe", "kvxfer.weights")
# Modules that import vLLM are only parsed.
READ_ONLY = ("kvxfer.connectors.vllm.weight_transfer", "kvxfer.connectors.vllm.weights")


def names_of(module: str) -> list[str]:
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return list(found.__all__)
    errors = inspect.getmembers(found, inspect.isclass)
    return [name for name, value in errors if issubclass(value, KvxferError)]


IMPORTS = [
    pytest.param(module, name, id=f"{path.name}: {module}.{name}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for module, names in re.findall(
        r"^from (kvxfer[\w.]*) import ([\w, ]+)$", path.read_text(), re.MULTILINE
    )
    for name in names.split(", ")
]
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples/python").glob("*.py")
    if path.name != "moe_generation.py"  # a program of the reference engine, which is not public
)
NAMES = [
    pytest.param(module, name, id=f"{module}.{name}")
    for module in PUBLIC
    for name in names_of(module)
]


def exported(module: str) -> list[str]:
    if module in PUBLIC:
        return names_of(module)
    assert module in READ_ONLY, f"{module} is not public: {', '.join(PUBLIC + READ_ONLY)}"
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_documents_import_public_names(module: str, name: str) -> None:
    assert name in exported(module)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_public_names(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for each in node.names:
                assert each.name in PUBLIC or not each.name.startswith("kvxfer."), each.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvxfer"):
            assert node.module is not None
            for each in node.names:
                module = f"{node.module}.{each.name}"
                assert module in PUBLIC or each.name in exported(node.module), module
        elif isinstance(node, ast.Attribute):
            assert not re.match(r"_(?!_)", node.attr), f"{path.name}: {node.attr} is private"


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_exists_and_is_described(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        own = inspect.getdoc(value) or ""
        assert own and not own.startswith(f"{name}(")  # the docstring that dataclasses make
