"""Files that an operator writes: YAML, or TOML if the name ends in .toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvxfer.errors import InvalidArgument, NotBuilt

T = TypeVar("T")

_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)


def read_document(path: Path, what: str) -> Any:
    """Returns the file's content. Raises InvalidArgument, and NotBuilt if PyYAML is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the {what} {path} cannot be read: {error}") from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"{path} is not TOML: {error}") from error
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise NotBuilt(
            f"{path} is YAML, which needs PyYAML: pip install 'kvxfer[server]', or write TOML "
            "into a file whose name ends in .toml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def convert(
    name: str,
    document: Any,
    to: type[T],
    *,
    reference: str,
    remedies: Mapping[str, str] | None = None,
) -> T:
    """Returns the document as a struct. `reference` names the text that lists its members.

    `remedies` maps the path of a member to an error text that says more than its type does.
    Raises InvalidArgument that names the file, the member, its value and the remedy.
    """
    document = {} if document is None else document
    try:
        return msgspec.convert(document, to)
    except msgspec.ValidationError as error:
        said = _sentence(str(error), document, reference, remedies or {})
        raise InvalidArgument(f"{name}: {said}") from error


def _sentence(message: str, document: Any, reference: str, remedies: Mapping[str, str]) -> str:
    """Returns msgspec's message with the member's path in front, and the wrong value."""
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else (message, None)
    keys = re.findall(r"\.?([^.\[\]]+)", path or "")
    where = ".".join(keys)
    if unknown := re.match(r"Object contains unknown field `(.*)`", what):
        return f"{'.'.join([*keys, unknown[1]])} is not known; {reference} lists what is"
    if what.startswith(("Expected", "Invalid")):
        value = document
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else _item(value, key)
        what = remedies.get(path or "", what)
        return f"{where or 'the file'} is {value!r}: {what[0].lower()}{what[1:]}"
    return f"{where}: {what}" if where else what


def _item(value: Any, key: str) -> Any:
    if isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None
