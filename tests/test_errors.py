from __future__ import annotations

import inspect
import re
import textwrap
import weakref
from pathlib import Path

import pytest

import kvxfer.errors
from kvxfer.errors import (
    ControlPlaneError,
    EngineError,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    LeaseExpired,
    PeerLost,
    by_code,
    every,
    without_traceback,
)

ROOT = Path(__file__).parents[1]


def tree(kind: type[KvxferError], depth: int = 0) -> list[str]:
    """Draws a class and those below it; neighbours without subclasses share lines."""
    lines, leaves, indent = ["  " * depth + kind.__name__], [], "  " * (depth + 1)
    known = set(every())
    for child in (*(each for each in kind.__subclasses__() if each in known), None):
        if child is not None and not child.__subclasses__():
            leaves.append(child.__name__)
            continue
        lines += textwrap.wrap(
            ", ".join(leaves), 92, initial_indent=indent, subsequent_indent=indent
        )
        leaves.clear()
        if child is not None:
            lines += tree(child, depth + 1)
    return lines


def test_the_module_draws_the_tree_of_its_errors() -> None:
    drawn = re.search(r"\n\n((?:    .*\n)+)\n", inspect.getdoc(kvxfer.errors) or "")
    assert drawn is not None
    assert textwrap.dedent(drawn[1]).splitlines() == tree(KvxferError)


def test_each_code_of_the_engine_has_a_class() -> None:
    source = (ROOT / "engine_native/src/error.cpp").read_text()
    codes = set(re.findall(r'return "([a-z-]+)";', source)) - {"ok"}
    assert len(codes) == source.count("case Errc::") - 1
    assert all(issubclass(by_code(code), EngineError | InvalidArgument) for code in codes)


class UnderWay:
    """An object that a frame holds."""


def lose(kept: list[KvxferError]) -> weakref.ref[UnderWay]:
    under_way = UnderWay()
    try:
        raise PeerLost("it exited")
    except PeerLost as error:
        kept.append(without_traceback(error))
    return weakref.ref(under_way)


def test_a_kept_error_keeps_no_object_of_its_frames() -> None:
    kept: list[KvxferError] = []
    assert lose(kept)() is None
    [error] = kept
    assert isinstance(error, PeerLost)
    assert str(error) == "it exited"


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("it exited"),
        LayoutMismatch("dtype", "float16", "float32"),
        LeaseExpired("too late"),
        ControlPlaneError("away", url="http://c"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_without_its_traceback_is_the_same(error: KvxferError) -> None:
    again = without_traceback(error)
    assert type(again) is type(error)
    assert again is not error
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
