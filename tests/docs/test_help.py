"""The text that help() shows of the public names."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pydoc
import re
import typing
from pathlib import Path

import pytest

import kvxfer
import kvxfer.client
from kvxfer import EngineOptions
from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from tests.docs.test_public_names import NAMES, PUBLIC

ROOT = Path(__file__).parents[2]


def shown(value: object) -> str:
    return pydoc.render_doc(value, renderer=pydoc.plaintext)


def test_the_package_names_all_that_is_in_it() -> None:
    said = inspect.getdoc(kvxfer) or ""
    names = set(kvxfer.__all__) - {"__version__"} | set(PUBLIC) - {"kvxfer"}
    assert names <= set(re.findall(r"[\w.]+", said))


def test_help_shows_the_classes_of_the_package() -> None:
    text = shown(kvxfer)
    assert "class Engine(" in text
    assert "alloc_shared(nbytes" in text


def test_help_shows_each_option_with_its_default() -> None:
    described = (inspect.getdoc(EngineOptions) or "").split("\n\n")[1:]
    texts = dict(each.split(": ", 1) for each in described)
    assert texts.keys() == EngineOptions.__optional_keys__
    assert [name for name, text in texts.items() if "default" not in text] == []


SECONDS = {"milliseconds": 1e-3, "microseconds": 1e-6, "seconds": 1}


def test_the_defaults_are_those_of_the_native_engine() -> None:
    header = (ROOT / "engine_native/include/kvxfer/types.hpp").read_text()
    (struct,) = re.findall(r"^struct EngineOptions \{\n(.*?)^\};", header, re.DOTALL | re.MULTILINE)
    told = dict(
        each.split(": ", 1) for each in (inspect.getdoc(EngineOptions) or "").split("\n\n")[1:]
    )
    checked = 0
    for kind, name, value in re.findall(r"^  ([\w:]+) (\w+) = ([^;]+);", struct, re.MULTILINE):
        if name not in told or kind == "FabricUse":
            continue
        text = " ".join(told[name].split())
        if kind == "Duration":
            unit, amount = re.fullmatch(r"std::chrono::(\w+)\((\d+)\)", value).groups()  # type: ignore[union-attr]
            seconds = int(amount) * SECONDS[unit]
            numbers = [float(each) for each in re.findall(r"\d[\d.]*(?:e-?\d+)?", text)]
            assert any(abs(each - seconds) < 1e-12 for each in numbers), name
        else:
            word = {"std::size_t{16} << 20": "16 MiB"}.get(value, value.strip('"').capitalize())
            assert re.search(rf"{re.escape(word)}", text, re.IGNORECASE), name
        checked += 1
    assert checked > 12


@pytest.mark.parametrize(("module", "name"), [each.values for each in NAMES])
def test_no_object_is_shown_by_its_address(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert not re.search(r".*object at 0x[0-9a-f]+.*", shown(value))


@pytest.mark.parametrize("client", [ControlPlaneClient, SyncControlPlaneClient])
def test_calls_of_the_control_plane_have_signatures_of_public_types(client: type) -> None:
    known = {*dir(builtins), *dir(typing), *kvxfer.client.__all__}
    known |= {"Awaitable", "AsyncGenerator", "Generator", "Collection", "Sequence", "T"}
    known |= {"Clock", "TracebackType", "AsyncBaseTransport", "BaseTransport", "httpx2"}
    text = shown(client)
    assert "register(self, spec: 'InstanceSpec'" in text
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if name.startswith("_"):
            continue
        signature = inspect.signature(method)
        kinds = [each.annotation for each in signature.parameters.values() if each.name != "self"]
        for word in re.findall(r"[A-Za-z]\w+", " ".join([*kinds, signature.return_annotation])):
            assert word in known, f"{name}: {word}"


def test_names_in_the_docstrings_of_calls_are_public() -> None:
    for name, method in inspect.getmembers(ControlPlaneClient, inspect.isfunction):
        for named in re.findall(r"`([A-Z]\w+)`", inspect.getdoc(method) or ""):
            assert named in kvxfer.client.__all__, f"{name}: {named}"
