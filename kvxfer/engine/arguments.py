"""The kinds of arguments of the engine's calls.

Each kind of argument is a named type in the signatures. A call checks nothing beforehand, as the
native engine does. If that or Python refuses, the call raises the error of refused(), which names
the first argument that is not of its kind, its value and what to pass. Valid arguments therefore
cost nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from kvxfer.engine.native import error_of, native
from kvxfer.errors import InvalidArgument, KvxferError, OutOfBounds

if TYPE_CHECKING:
    from kvxfer._native import _Integers as Integers
    from kvxfer._native import _Readable as Readable
    from kvxfer._native import _Writable as Writable

Address: TypeAlias = str
Bytes: TypeAlias = int
Count: TypeAlias = int
Descriptor: TypeAlias = bytes
Gpu: TypeAlias = int
Imm: TypeAlias = int
Length: TypeAlias = int
Nic: TypeAlias = int
Offset: TypeAlias = int
Offer: TypeAlias = bytes
Seconds: TypeAlias = float
Slots: TypeAlias = int
Stream: TypeAlias = Any
Stride: TypeAlias = int

__all__ = [
    "REFUSALS",
    "Address",
    "Bytes",
    "Count",
    "Descriptor",
    "Gpu",
    "Imm",
    "Integers",
    "Length",
    "Nic",
    "Offer",
    "Offset",
    "Readable",
    "Seconds",
    "Slots",
    "Stream",
    "Stride",
    "Writable",
    "deadline",
    "refused",
    "require_callable",
    "require_seconds",
]

REFUSALS: Final = (
    native.Error, TypeError, ValueError, AttributeError, OverflowError, BufferError
)  # fmt: skip
"""The errors that the native engine and Python raise for arguments."""

_OF_ARGUMENTS: Final = ("invalid-argument", "out-of-bounds", "fabric-unavailable")


_MOST: Final = 2**64 - 1


class _Kind(NamedTuple):
    takes: str
    fits: Callable[[Any], object]  # false, or raises, for a value of another kind
    beyond: type[KvxferError] = InvalidArgument  # for an int that is out of range


def _whole(first: int, last: int, beyond: type[KvxferError] = InvalidArgument) -> _Kind:
    bounds = f"of at least {first}, below 2**64" if last == _MOST else f"from {first} to {last}"
    return _Kind(
        f"an int {bounds}",
        lambda value: first <= operator.index(value) <= last,
        beyond,
    )


def _named(*classes: str, takes: str) -> _Kind:
    """Returns the kind of classes with these names: the modules of the classes import this one."""
    return _Kind(takes, lambda value: any(each.__name__ in classes for each in type(value).__mro__))


def _seconds(value: Any) -> bool:
    try:
        return bool(0 <= value <= 1e9)
    except TypeError:
        return False


def _is_number_list(value: Any) -> bool:
    if isinstance(value, str):
        return False
    if not isinstance(value, Sequence):
        value = memoryview(value.__array__() if hasattr(value, "__array__") else value)
        return value.ndim == 1 and value.format.lstrip("@=<") in tuple("bhilqnBHILQN")
    return all(operator.index(each) is not None for each in value)


def _is_ranges(value: Any) -> bool:
    region, offset, length = _KINDS["Region"], _KINDS["Offset"], _KINDS["Length"]
    return all(
        region.fits(each[0]) and offset.fits(each[1]) and length.fits(each[2]) and len(each) == 3
        for each in value
    )


_BUFFER: Final = "a contiguous buffer, such as bytes or a numpy array"

_KINDS: Final[Mapping[str, _Kind]] = {
    "Address": _Kind("kvx://HOST:PORT/ENGINE_ID", lambda value: isinstance(value, str)),
    "Buffer": _Kind(_BUFFER, lambda value: memoryview(value).c_contiguous),
    "Bytes": _whole(1, _MOST),
    "Callable": _Kind("something that can be called", callable),
    "Count": _whole(0, _MOST),
    "Counter": _named("Counter", takes="a Counter of this engine"),
    "Descriptor": _Kind(
        "the bytes of a region's descriptor, or of a grant",
        lambda value: isinstance(value, bytes) and len(value) == native.DESCRIPTOR_BYTES,
    ),
    "Engine": _named("Engine", takes="an Engine"),
    "EngineCore": _named("EngineCore", takes="an Engine or a PolledEngine"),
    "Gpu": _whole(0, 2**31 - 1),
    "Imm": _whole(0, 2**32 - 1),
    "Integers": _Kind("integers: a sequence, or a one-dimensional array", _is_number_list),
    "Length": _whole(0, _MOST, OutOfBounds),
    "Nic": _whole(0, 2**32 - 1),
    "Offer": _Kind("the bytes of ReceivePool.offer()", lambda value: isinstance(value, bytes)),
    "Offset": _whole(0, _MOST, OutOfBounds),
    "Operation": _named("Operation", takes="an Operation"),
    "Peer": _named("Peer", takes="a Peer"),
    "Ranges": _Kind("(region, offset, bytes) tuples", _is_ranges),
    "Readable": _Kind(_BUFFER, lambda value: memoryview(value).c_contiguous),
    "Region": _named(
        "MemoryRegion", "Memory", takes="what Engine.alloc() or Engine.register() returns"
    ),
    "Seconds": _Kind("a number of seconds from 0 to 1e9", _seconds),
    "Slots": _whole(1, 2**16),
    "Stream": _Kind(
        "a torch.cuda.Stream, an object with __cuda_stream__, or a CUstream as an int",
        lambda value: (
            isinstance(value, int)
            or hasattr(value, "cuda_stream")
            or hasattr(value, "__cuda_stream__")
        ),
    ),
    "Stride": _whole(0, _MOST),
    "WatchFor": _named("WatchFor", takes="what Watcher.at() returns"),
    "Writable": _Kind(
        f"{_BUFFER}, that can be written",
        lambda value: (view := memoryview(value)).c_contiguous and not view.readonly,
    ),
    "bool": _Kind("True or False", lambda value: isinstance(value, bool | int)),
}


def refused(
    error: Exception, call: Callable[..., object], given: Mapping[str, object]
) -> Exception:
    """Returns the error that a call raises in place of one of REFUSALS. `given` are its
    locals()."""
    if isinstance(error, native.Error) and error.args[0] not in _OF_ARGUMENTS:
        code, text = error.args
        return error_of(code, text)
    for parameter in inspect.signature(call).parameters.values():
        kind = parameter.annotation
        if parameter.name in given and isinstance(kind, str):
            wrong = _wrong(parameter.name, given[parameter.name], kind)
            if wrong is not None:
                return wrong
    return error_of(*error.args) if isinstance(error, native.Error) else error


def require_callable(name: str, value: object) -> None:
    """Raises InvalidArgument that names the argument, before it would fail when it is called."""
    if not callable(value):
        raise _refusal(name, value, "something that can be called")


def require_seconds(timeout: Seconds) -> None:
    """Raises InvalidArgument unless `timeout` is from 0 to 1e9: not NaN, not infinity."""
    if not _seconds(timeout):
        raise _refusal("timeout", timeout, _KINDS["Seconds"].takes)


def deadline(timeout: Seconds | None) -> asyncio.Timeout:
    """Returns asyncio.timeout(). Raises InvalidArgument as require_seconds() does."""
    if timeout is not None:
        require_seconds(timeout)
    return asyncio.timeout(timeout)


def _wrong(name: str, value: Any, annotation: str) -> KvxferError | None:
    """Returns an error that says what to pass; None if the value is of its kind, or the kind is
    unknown."""
    kind, _, optional = annotation.partition(" | None")
    if value is None and (optional or annotation.endswith(" | None")):
        return None
    if (items := re.fullmatch(r"Sequence\[(.*)\]", kind)) is not None:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            return _refusal(name, value, "a list")
        each = (_wrong(f"{name}[{n}]", item, items[1]) for n, item in enumerate(value))
        return next((wrong for wrong in each if wrong is not None), None)
    described = _KINDS.get(kind.partition("[")[0])
    if described is None:
        return None
    try:
        if described.fits(value):
            return None
        error = described.beyond
    except Exception:  # raised by any object that the caller passed
        error = InvalidArgument
    return _refusal(name, value, described.takes, error)


def _refusal(
    name: str, value: object, takes: str, error: type[KvxferError] = InvalidArgument
) -> KvxferError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return error(f"{name} is {shown}; pass {takes}")
