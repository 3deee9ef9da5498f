"""A record means the same to msgspec and to pydantic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta
from pydantic import TypeAdapter, ValidationError

from kvxfer.docstrings import docstrings
from kvxfer.instances import Role
from kvxfer.record import HexInt, Record, at_api
from kvxfer.record_schema import example, parameter

Name = Annotated[str, Meta(pattern="^[a-z]+$", max_length=8, examples=["ann"])]


@dataclass(frozen=True, slots=True)
class Size:
    """A dataclass that is no record but is described like one."""

    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)] = 1


class Base(Record, frozen=True, kw_only=True):
    """The common part."""

    name: Name
    """The name; None without one."""


class Thing(Base, frozen=True, kw_only=True):
    """One of them."""

    size: Size
    role: Role = Role.BOTH
    kind: Literal["a", "b"] = "a"
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=2)] = ("x",)
    pair: tuple[int, int] = (1, 2)
    raw: Annotated[bytes, Meta(examples=["AAE="])] = b""
    note: str | msgspec.UnsetType = msgspec.UNSET


class Strict(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    number: int = 0


class Tagged(Record, frozen=True, tag="tagged"):
    limited: Annotated[int, at_api(ge=0, lt=10)]


class Hashed(Record, frozen=True):
    value: Annotated[int, HexInt]


class Checked(Record, frozen=True):
    number: int

    def __post_init__(self) -> None:
        if self.number == 13:
            raise ValueError("number is 13; choose another")


LEAST = {"name": "ann", "size": {"width": 2}}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({}, None),
        ({"name": "Ann"}, ("name",)),
        ({"name": "ninechars"}, ("name",)),
        ({"size": {"width": 0}}, ("size", "width")),
        ({"size": {"height": 1}}, ("size", "width")),
        ({"role": "cook"}, ("role",)),
        ({"kind": "c"}, ("kind",)),
        ({"ratio": None}, None),
        ({"ratio": 0.5}, None),
        ({"ratio": 0.0}, ("ratio",)),
        ({"ratio": 1.5}, ("ratio",)),
        ({"names": []}, ("names",)),
        ({"names": ["a", "b", "c"]}, ("names",)),
        ({"names": ["a", "B"]}, ("names", 1)),
        ({"pair": [3, 4]}, None),
        ({"pair": [3]}, ("pair", 1)),
        ({"raw": "AAE="}, None),
        ({"raw": "A"}, ("raw",)),
        ({"note": "x"}, None),
        ({"unknown": 1}, None),
    ],
)
def test_both_read_the_same_and_refuse_the_same(change, where):
    given = msgspec.json.encode({**LEAST, **change})
    adapter = TypeAdapter(Thing)
    if where is None:
        read = adapter.validate_json(given)
        assert read == msgspec.json.decode(given, type=Thing)
        assert adapter.dump_json(read) == msgspec.json.encode(read)
        return
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(given, type=Thing)
    with pytest.raises(ValidationError) as error:
        adapter.validate_json(given)
    assert error.value.errors()[0]["loc"] == where


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_number_is_finite(number):
    with pytest.raises(ValidationError):
        TypeAdapter(Thing).validate_python({**LEAST, "ratio": float(number)})


def test_existing_record_is_accepted_unchecked():
    made = Thing(name="NOT CHECKED", size=Size(1))
    assert TypeAdapter(Thing).validate_python(made) is made


def test_unknown_members_are_refused_if_the_record_forbids_them():
    with pytest.raises(ValidationError, match="not permitted"):
        TypeAdapter(Strict).validate_python({"numbr": 1})


def test_tag_is_a_member():
    adapter = TypeAdapter(Tagged)
    assert adapter.validate_python({"type": "tagged", "limited": 3}) == Tagged(3)
    for wrong in ({"limited": 3}, {"type": "other", "limited": 3}):
        with pytest.raises(ValidationError) as error:
            adapter.validate_python(wrong)
        assert error.value.errors()[0]["loc"] == ("type",)


def test_bounds_of_the_api_do_not_bind_a_decoder():
    assert msgspec.json.decode(b'{"type":"tagged","limited":10}', type=Tagged) == Tagged(10)
    with pytest.raises(ValidationError):
        TypeAdapter(Tagged).validate_python({"type": "tagged", "limited": 10})


def test_hash_is_text():
    adapter = TypeAdapter(Hashed)
    assert adapter.validate_python({"value": "ffffffffffffffff"}) == Hashed(2**64 - 1)
    for wrong in (1, "ff", "F" * 16):
        with pytest.raises(ValidationError):
            adapter.validate_python({"value": wrong})


def test_error_of_a_records_own_check_is_reported():
    with pytest.raises(ValidationError, match="number is 13; choose another"):
        TypeAdapter(Checked).validate_python({"number": 13})


def test_schema_says_what_the_class_says():
    schema = TypeAdapter(Thing).json_schema()
    assert (schema["title"], schema["description"]) == ("Thing", "One of them.")
    assert schema["required"] == ["name", "size"]
    members = schema["properties"]
    assert members["name"]["description"] == "The name; null without one."
    assert members["name"]["pattern"] == "^[a-z]+$"
    assert members["role"]["default"] == "both"
    assert members["raw"] == {
        "contentEncoding": "base64",
        "default": "",
        "title": "Raw",
        "type": "string",
    }
    assert set(schema["$defs"]) == {"Role", "Size"}
    assert docstrings(Thing) == {"name": "The name; None without one."}


def test_example_is_made_of_the_examples_of_its_members():
    assert json.loads(msgspec.json.encode(example(Thing))) == {
        "name": "ann",
        "size": {"width": 1, "height": 1},
        "role": "both",
        "kind": "a",
        "ratio": None,
        "names": ["x"],
        "pair": [1, 2],
        "raw": "AAE=",
    }


def test_text_without_an_example_is_named():
    class Bare(Record, frozen=True):
        text: str

    with pytest.raises(TypeError, match=r"Bare\.text: there is no example of <class 'str'>"):
        example(Bare)


def test_parameter_has_the_bounds_and_texts_of_its_type():
    assert parameter(Name) == {"pattern": "^[a-z]+$", "max_length": 8, "examples": ["ann"]}
