from __future__ import annotations

import weakref

import pytest

from kvxfer.errors import (
    ControlPlaneError,
    KvxferError,
    LayoutMismatch,
    PeerLost,
    without_traceback,
)


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
        ControlPlaneError("away", url="http://c"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_without_its_traceback_is_the_same(error: KvxferError) -> None:
    again = without_traceback(error)
    assert type(again) is type(error)
    assert again is not error
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
