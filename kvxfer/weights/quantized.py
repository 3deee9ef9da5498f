"""The quantised copies of a training rank's parameters, and the scales that ranks agree on."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.holdings import Holding
from kvxfer.weights.quantize import (
    LIMITS,
    as_sent,
    cells_of,
    make_scales,
    quantize_box,
    take_maxima,
)
from kvxfer.weights.scale_exchange import Held, Kind, exchange_of
from kvxfer.weights.torch_boxes import Box

Group: TypeAlias = torch.distributed.ProcessGroup

_KEPT: Final = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT: Final = 64
"""The alignment of a parameter's scales, in elements."""


class Source(NamedTuple):
    """The box that a rank keeps of a parameter, and how it is sent."""

    name: str
    kind: Kind
    tensor: torch.Tensor
    """The box; of any strides."""


class _Scales(NamedTuple):
    """The scales of all parameters on one device."""

    flat: torch.Tensor
    """Maxima, then scales, of all parameters; aligned for each."""
    names: list[str]
    starts: list[int]
    own: torch.Tensor
    """The indices of those that other ranks have a part of."""
    at: torch.Tensor
    """The positions of these in the vector of the exchange."""


class QuantizedCopies:
    """The quantised copies of one rank. The constructor and fill() are collectives of the group."""

    def __init__(
        self, sources: Sequence[Source], group: Group | None, *, refused: str | None = None
    ) -> None:
        """refused: why this rank has no sources; all ranks raise that. group: all ranks that have a
        part of these parameters. None means the default group, or this rank alone if
        torch.distributed has none.

        Raises at all ranks of the group, with the parameter's name: InvalidArgument if one cannot
        be quantised, and WeightsMismatch if ranks do not quantise alike.
        """
        self._sources = {source.name: source for source in sources}
        self._group = group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._group = group or torch.distributed.group.WORLD
        ranks, rank, self._device = self._told(refused)
        self._exchange = exchange_of(ranks, rank)
        self._alone = len(ranks) == 1 or not self._exchange.names
        self.holdings: Final = [each for source in sources for each in _holdings_of(*source[:2])]
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensor of each holding, by name; filled by fill()."""
        self._allocate()

    def take(self, sources: Sequence[Source]) -> None:
        """Replaces the sources by the same parameters in other memory."""
        devices = {name: source.tensor.device for name, source in self._sources.items()}
        self._sources = {source.name: source for source in sources}
        if devices != {source.name: source.tensor.device for source in sources}:
            self._allocate()

    def _allocate(self) -> None:
        self.tensors = {}
        self._views: dict[str, torch.Tensor] = {}
        devices = dict.fromkeys(source.tensor.device for source in self._sources.values())
        self._scales = [self._scales_on(device) for device in devices]
        for name, kind, tensor in self._sources.values():
            values, scales = _holdings_of(name, kind)
            dtype = getattr(torch, values.dtype)
            self.tensors[name] = torch.empty(values.shape, dtype=dtype, device=tensor.device)
            self.tensors[scales.name] = self._views[name].view(scales.shape)

    def _told(self, refused: str | None) -> tuple[list[Held], int, torch.device]:
        """Returns what all ranks have, this rank's number, and the device of the vector."""
        held: dict[Kind, list[str]] = {}
        for name, kind, _ in self._sources.values():
            held.setdefault(kind, []).append(name)
        devices = {source.tensor.device.type for source in self._sources.values()}
        refusals = (refused, *(_refusal(*source) for source in self._sources.values()))
        refused = next(filter(None, refusals), None)
        told = [(refused, held, devices)]
        rank, device = 0, torch.device("cpu")
        if self._group is not None:
            rank = torch.distributed.get_rank(self._group)
            if rank < 0:
                raise InvalidArgument("this rank is not in the group that its weights are split in")
            told *= torch.distributed.get_world_size(self._group)
            torch.distributed.all_gather_object(told, told[rank], group=self._group)
            device = _device(self._group, set().union(*(each for _, _, each in told)))
        for refused, _, _ in told:
            if refused is not None:
                raise InvalidArgument(refused)
        return [each for _, each, _ in told], rank, device

    def _scales_on(self, device: torch.device) -> _Scales:
        names, starts, own, at = [], [], [], []
        shapes = {}
        end = 0
        for name, kind, tensor in self._sources.values():
            if tensor.device == device:
                shapes[name] = cells_of(kind.cell, kind.box).shape
                names.append(name)
                starts.append(end)
                if name in self._exchange.shared:
                    shared = self._exchange.shared[name]
                    own.append(torch.from_numpy(shared.own + end))
                    at.append(torch.from_numpy(shared.at))
                end += -(-torch.Size(shapes[name]).numel() // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(end, dtype=torch.float32, device=device)
        for name, start in zip(names, starts, strict=True):
            shape = torch.Size(shapes[name])
            self._views[name] = flat[start : start + shape.numel()].view(shape)
        none = torch.empty(0, dtype=torch.int64)
        return _Scales(
            flat,
            names,
            starts,
            torch.cat(own or [none]).to(device),
            torch.cat(at or [none]).to(self._device),
        )

    def fill(self, refused: Exception | None = None) -> None:
        """Quantises the parameters as they are now, with one small exchange among the ranks.

        refused: why this rank cannot. This rank raises it, and all others WeightsMismatch. All
        ranks raise InvalidArgument that names a parameter with a NaN or an infinity.
        """
        if refused is None:
            for name, kind, tensor in self._sources.values():
                take_maxima(tensor, kind.cell, kind.box, self._views[name])
        self._agree(refused)
        for name, kind, tensor in self._sources.values():
            make_scales(self._views[name], kind.how.dtype)
            quantize_box(tensor, kind.cell, kind.box, self._views[name], self.tensors[name])

    def _agree(self, refused: Exception | None) -> None:
        """Agrees with all ranks on the maxima of shared cells.

        The last element of the vector is 0, or the place among all names, from 1, of a parameter
        that is not finite. It is infinite if a rank refuses.
        """
        bad = math.inf if refused is not None else self._not_finite()
        if not self._alone:
            vector = torch.zeros(self._exchange.length + 1, device=self._device)
            for scales in self._scales:
                told = torch.nan_to_num(scales.flat[scales.own], nan=0.0, posinf=0.0)
                vector[scales.at] = told.to(self._device)
            vector[-1] = bad
            torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MAX, group=self._group)
            for scales in self._scales:
                scales.flat[scales.own] = vector[scales.at].to(scales.flat.device)
            bad = vector[-1].item()
        if bad == math.inf:
            self._refuse(refused)
        if bad:
            name = self._exchange.names[int(bad) - 1]
            raise InvalidArgument(
                f"{name} has a NaN or an infinity, which has no scale; nothing is sent"
            )

    def _refuse(self, refused: Exception | None) -> NoReturn:
        """Raises the refusal of a rank, at all ranks."""
        told: list[str | None] = [None if refused is None else str(refused)]
        if not self._alone:
            told *= torch.distributed.get_world_size(self._group)
            torch.distributed.all_gather_object(told, told[0], group=self._group)
        if refused is not None:
            raise refused
        rank, why = next((rank, why) for rank, why in enumerate(told) if why is not None)
        raise WeightsMismatch(f"rank {rank} of the group: {why}")

    def _not_finite(self) -> int:
        for scales in self._scales:
            where = torch.isfinite(scales.flat).logical_not_().nonzero()
            if len(where):
                name = scales.names[bisect.bisect_right(scales.starts, int(where[0])) - 1]
                return self._exchange.names.index(name) + 1
        return 0


def _holdings_of(name: str, kind: Kind) -> tuple[Holding, Holding]:
    """Returns the holdings of a box's values and of its scales."""
    how, whole, box = kind
    grid = cells_of(kind.cell, Box((0,) * len(whole), whole))
    mine = cells_of(kind.cell, box)
    values = Holding(name, how.dtype, whole, box.offset, box.shape)
    scales = Holding(
        name + how.suffix,
        "float32",
        as_sent(how, grid.shape, 1),
        as_sent(how, mine.offset, 0),
        as_sent(how, mine.shape, 1),
    )
    return values, scales


def _refusal(name: str, kind: Kind, tensor: torch.Tensor) -> str | None:
    how, whole, _ = kind
    if len(whole) < 2:
        return (
            f"{name} has the shape {list(whole)}, and only matrices are quantised; make `quantize` "
            "return None for it"
        )
    if tensor.dtype not in _KEPT:
        return (
            f"{name} is kept in {tensor.dtype}, and only float32, bfloat16 and float16 are "
            "quantised; make `quantize` return None for it"
        )
    if how.dtype not in LIMITS or min(how.cell) < 0:
        return f"{name} cannot be quantised as {how}; use one of those in kvxfer.weights.quantize"
    return None


def _device(group: Group, kinds: set[str]) -> torch.device:
    """Returns the parameters' device if the group can reduce there, otherwise one where it can. All
    ranks decide alike, also those without a parameter."""
    able = sorted({device.type for device in group._device_types})
    here = [kind for kind in able if kind in kinds] or able
    kind = next((each for each in here if each != "cpu"), "cpu")
    if kind == "cpu" or not kinds:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
