"""Windows: tensors that look like a whole parameter, while memory has at most a box of it.

A model's weight loaders know which parts of a parameter a rank needs: they slice the checkpoint's
tensor and copy the slice. With the windows of a `Wants`, they move nothing, and the `Wants` records
the boxes. With windows over staged boxes (`window_over`), they copy from these.

A view of a window is a window. PyTorch computes the view, on a tensor without memory.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.holdings import Holding

__all__ = ["Wants", "window_over", "written_by"]

Indices = tuple[int, ...]


class Box(NamedTuple):
    """A box of a parameter, in elements along each dimension."""

    offset: Indices
    shape: Indices

    def around(self, other: Box) -> Box:
        """Returns the smallest box that holds both."""
        first = tuple(map(min, self.offset, other.offset))
        ends = map(max, self._ends(), other._ends())
        return Box(first, tuple(end - at for end, at in zip(ends, first, strict=True)))

    def holds(self, other: Box) -> bool:
        return self.around(other) == self

    def _ends(self) -> Indices:
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))

    def __str__(self) -> str:
        ends = zip(self.offset, self._ends(), strict=True)
        return "[{}]".format(", ".join(f"{first}:{end}" for first, end in ends))


class Walk(NamedTuple):
    """The path of a view through a whole parameter."""

    begin: Indices
    """The first element."""
    steps: tuple[Indices, ...]
    """The step to the next element of each dimension of the view, along each dimension of the
    parameter."""
    box: Box | None
    """The smallest box with all elements. If the view crosses the edge of a dimension into the next
    row, the box has that whole dimension. None for an empty view."""


def walk_of(view: torch.Tensor, whole: Indices) -> Walk:
    """Derives the walk of a view of a contiguous parameter from its offset and strides."""
    place = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]

    def digits(distance: int) -> Indices:
        found = []
        for dim, stride in enumerate(place):
            found.append(distance // stride if dim == 0 else distance // stride % whole[dim])
        return tuple(found)

    if view.numel() == 0:
        return Walk((), (), None)
    begin = digits(int(view.storage_offset()))
    steps = tuple(map(digits, view.stride()))
    first, shape, over = list(begin), [1] * len(whole), 0
    for dim in reversed(range(len(whole))):
        ways = (step[dim] * (size - 1) for step, size in zip(steps, view.shape, strict=True))
        last = begin[dim] + sum(ways) + over
        over = last // whole[dim]
        if over:
            first[dim], shape[dim] = 0, whole[dim]
        else:
            shape[dim] = last + 1 - begin[dim]
    return Walk(begin, steps, Box(tuple(first), tuple(shape)))


class _Parameter(abc.ABC):
    """The state that all windows of a parameter share."""

    def __init__(self, name: str, dtype: torch.dtype, shape: Indices) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.whole = shape or (1,)
        if 0 in shape:
            raise InvalidArgument(f"{name} has the shape {list(shape)}: it has no elements")

    def window(self) -> Window:
        return Window(self, torch.empty(self.shape, dtype=self.dtype, device="meta"))

    @abc.abstractmethod
    def use(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation that is not a view."""


class Window(torch.Tensor):
    """A view of a parameter; read only."""

    _parameter: _Parameter
    _view: torch.Tensor

    @staticmethod
    def __new__(cls, parameter: _Parameter, view: torch.Tensor) -> Window:
        made: Window = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        made._parameter = parameter
        made._view = view
        return made

    def __init__(self, *_: Any) -> None:
        """Does nothing: __new__() has set everything."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Window({self._parameter.name}{list(self._view.shape)}, {self._view.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in written_by(func, args, kwargs):
            if isinstance(value, Window):
                raise InvalidArgument(
                    f"{func} writes to {value._parameter.name}; weights that are loaded can only "
                    "be read"
                )
        first = args[0] if args else None
        if func.is_view and isinstance(first, Window):
            views = func(first._view, *args[1:], **kwargs)
            several = isinstance(views, list | tuple)
            if all(map(first._has_as_view, views if several else (views,))):
                if several:
                    return type(views)(Window(first._parameter, each) for each in views)
                return Window(first._parameter, views)
        return _window_in(args, kwargs)._parameter.use(func, args, kwargs)

    def _has_as_view(self, view: torch.Tensor) -> bool:
        return view.dtype == self._view.dtype and not (view.is_neg() or view.is_conj())


class Wants:
    """A recorder of what is read through windows; moves nothing. Use it from one thread."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}

    def window(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Returns a window on a whole parameter. Raises InvalidArgument if the name is taken."""
        if name in self._wanted:
            raise InvalidArgument(f"there are two parameters {name}")
        wanted = self._wanted[name] = _Wanted(name, dtype, tuple(shape))
        return wanted.window()

    def holdings(self) -> tuple[Holding, ...]:
        """Returns the boxes that were read, sorted by name."""
        return tuple(
            Holding(
                name=name,
                dtype=str(each.dtype).removeprefix("torch."),
                whole=each.whole,
                offset=each.box.offset,
                shape=each.box.shape,
            )
            for name, each in sorted(self._wanted.items())
            if each.box
        )


class _Wanted(_Parameter):
    box: Box | None = None

    def use(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the operation's result, without memory; does not change what it writes to."""

        def note(value: Any) -> Any:
            if isinstance(value, Window):
                noted = value._parameter
                if not isinstance(noted, _Wanted):
                    raise InvalidArgument(f"{func} mixes a recording with the staged {noted.name}")
                noted.add(walk_of(value._view, noted.whole).box)
                return value._view
            return _without_memory(value)

        for value in written_by(func, args, kwargs):
            if self.dtype in _SCALED and value.dtype.itemsize > 1:
                raise WeightsMismatch(
                    f"{self.name} is sent in {self.dtype}, and the model keeps it in "
                    f"{value.dtype}, without scales; make `quantize` return None for it"
                )
        try:
            made = _deep(note, (args, kwargs), lambda args, kwargs: func(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if not _LOOKS & set(func.tags) and not isinstance(error, NotImplementedError):
                raise
            raise WeightsMismatch(
                f"the loader of {self.name} reads its values ({func}), which do not exist "
                "before the first update"
            ) from error
        written = written_by(func, args, kwargs)
        if not written:
            return made
        return written[0] if len(written) == 1 else tuple(written)

    def add(self, box: Box | None) -> None:
        if box is not None:
            self.box = self.box.around(box) if self.box else box


def window_over(
    holding: Holding, staged: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Returns a window on the whole parameter of `holding`, whose box is `staged`. Views of it are
    views of `staged`; reading outside the box raises WeightsMismatch. With `shape` () it is a
    scalar.

    Raises InvalidArgument if `staged` is not that box."""
    dtype = str(staged.dtype).removeprefix("torch.")
    if (dtype, tuple(staged.shape)) != (holding.dtype, holding.shape):
        raise InvalidArgument(
            f"{holding.name}: {dtype} of {list(staged.shape)} is staged, "
            f"{holding.dtype} of {list(holding.shape)} wanted"
        )
    whole = holding.whole if shape is None else tuple(shape)
    return _Staged(holding, staged, whole).window()


class _Staged(_Parameter):
    def __init__(self, holding: Holding, staged: torch.Tensor, shape: Indices) -> None:
        super().__init__(holding.name, staged.dtype, shape)
        self._box = Box(holding.offset, holding.shape)
        self._staged = staged

    def use(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, Window):
                staged = value._parameter
                if not isinstance(staged, _Staged):
                    raise InvalidArgument(f"{func} mixes the staged {self.name} with a recording")
                return staged.real(value._view)
            return value

        return _deep(real, (args, kwargs), lambda args, kwargs: func(*args, **kwargs))

    def real(self, view: torch.Tensor) -> torch.Tensor:
        begin, steps, box = walk_of(view, self.whole)
        if box is None:
            return self._staged.new_empty(view.shape)
        if not self._box.holds(box):
            raise WeightsMismatch(
                f"{self.name}{box} is read, and {self.name}{self._box} was staged; the model reads "
                "other weights than when its wants were recorded"
            )
        # If a step crosses an edge, the box has the whole dimension, and strides as the parameter
        # has them.
        place = self._staged.stride()
        ahead = map(int.__sub__, begin, self._box.offset)
        return self._staged.as_strided(
            view.shape,
            tuple(sum(map(int.__mul__, step, place)) for step in steps),
            self._staged.storage_offset() + sum(map(int.__mul__, ahead, place)),
        )


_SCALED: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Dtypes whose values mean nothing without their scales."""
_META: Final = torch.device("meta")
_LOOKS: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _without_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device != _META:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return _META if isinstance(value, torch.device) else value


def _deep(change: Callable[[Any], Any], arguments: tuple[Any, Any], call: Any) -> Any:
    """Calls with every argument changed, also those in lists."""

    def changed(value: Any) -> Any:
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(map(changed, value))
        return change(value)

    args, kwargs = arguments
    return call(changed(args), {name: changed(value) for name, value in kwargs.items()})


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that a PyTorch operation writes to."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list) else [value]
    return found


def _window_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Window:
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Window):
                return each
    raise InvalidArgument("none of the arguments is a window")
