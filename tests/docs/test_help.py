"""The text that help() shows of the public names."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pydoc
import re
import typing
from typing import Any

import pytest

import kvxfer
import kvxfer.client
from kvxfer import EngineOptions, EngineTuning
from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from tests.docs.test_public_names import NAMES, PUBLIC


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


def described(cls: Any) -> dict[str, str]:
    """The text of each option in help()."""
    texts = (inspect.getdoc(cls) or "").split("\n\n")[1:]
    return dict(" ".join(each.split()).split(": ", 1) for each in texts)


@pytest.mark.parametrize("cls", [EngineOptions, EngineTuning])
def test_help_shows_each_option_with_its_default(cls: Any) -> None:
    texts = described(cls)
    assert texts.keys() == cls.__optional_keys__
    assert [n for n, text in texts.items() if "Default: " not in text] == [*{"tuning"} & {*texts}]


def test_help_has_the_defaults_and_bounds_of_the_engine() -> None:
    texts = described(EngineOptions) | described(EngineTuning)
    for name, told in {
        "name": 'Default: "". Bounds: 0 to 128 bytes.',
        "nics": "Default: [].",
        "gid_index": "Default: -1. Bounds: 0 to 255, or -1.",
        "peer_timeout": "Default: 0.7 s. Bounds: 0.002 s or more.",
        "operation_timeout": "Default: 30 s. Bounds: 1 ns or more.",
        "lanes": "Default: 2. Bounds: 1 to 64.",
        "window_bytes": "Default: 16 MiB. Bounds: 1 MiB or more.",
        "spin": "Default: 200 µs. Bounds: 0 s or more.",
        "memory_windows": "Default: True.",
    }.items():
        assert texts[name].endswith(f" {told}")


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
