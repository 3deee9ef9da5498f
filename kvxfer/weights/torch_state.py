"""The holdings of a training rank, from a torch module or from tensors by name.

A DTensor's placements give its box. Nothing is gathered: a rank describes its box of each
parameter, and sends it from where it is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

import torch
from msgspec.structs import replace
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.layout import ITEM_BYTES
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.quantize import Quantize
from kvxfer.weights.quantized import Group, QuantizedCopies, Source
from kvxfer.weights.scale_exchange import Kind
from kvxfer.weights.torch_boxes import NOTHING, Box, box_of

Rename: TypeAlias = Callable[[str], str | None]
"""A function from a parameter's name to its name in the checkpoint; None if it is not sent."""
SentAs: TypeAlias = Callable[[str, str], str]
"""A function from a parameter's checkpoint name and dtype to the dtype in which it is sent."""

_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch.compile, FSDP and activation checkpointing add to names."""
_NO_PLACE: Final = Holdings(())
_EXTRA_STATE: Final = "_extra_state"


Rows: TypeAlias = dict[str, torch.Tensor]
"""Parameters as training keeps them, by their names in the checkpoint."""


class _Kept(NamedTuple):
    """The boxes that a rank has of its parameters."""

    holdings: dict[str, Holding]
    """The holdings that are sent without scales."""
    boxes: dict[str, torch.Tensor]
    """The box of each holding, by name; of any strides, and in the dtype of training."""
    quantized: list[Source]
    tied: dict[str, str]


class TrainingState:
    """The holdings of one rank, and the memory that they are sent from. Any thread, one at a time.

    Each `staged()` follows parameters that have moved to other memory: by an assignment to `.data`,
    `load_state_dict(assign=True)`, or `to()` of another device. The inputs of the plan must not
    change: names, whole shapes, the boxes of this rank, the dtypes that are sent, and which names
    are tied.

    Until the next `staged()`, the state keeps alive the memory that parameters have left. Made by
    state_of().
    """

    def __init__(
        self,
        parameters: Callable[[], Rows],
        keep: Callable[[Rows], _Kept],
        group: Group | None,
        scaled: bool,
        place: Holdings,
    ) -> None:
        """scaled: whether parameters may be quantised."""
        self._parameters, self._keep = parameters, keep
        try:
            rows = parameters()
            self._kept = keep(rows)
        except Exception as error:
            if scaled:  # the other ranks of the group wait
                QuantizedCopies((), group, refused=str(error))
            raise
        self._marks = _marks(rows)
        self._quantized = QuantizedCopies(self._kept.quantized, group) if scaled else None
        scales = [] if self._quantized is None else self._quantized.holdings
        self.holdings: Final = replace(
            place, parameters=(*self._kept.holdings.values(), *scales), tied=self._kept.tied
        )
        self.tensors: Final[dict[str, torch.Tensor]] = {}
        """The box of each holding, by name: contiguous, and read in place."""
        self._copied: dict[str, torch.Tensor] = {}
        self._take()

    @property
    def copied(self) -> frozenset[str]:
        """The names whose tensor is a copy: not contiguous at training, sent in another dtype,
        quantised, or scales."""
        made = () if self._quantized is None else self._quantized.tensors
        return frozenset([*self._copied, *made])

    @torch.no_grad()
    def staged(self) -> dict[str, torch.Tensor]:
        """Returns `tensors` for a push, in the current memory and with up-to-date copies. Pass this
        method to Trainer as `tensors`. Waits for the current streams of GPUs, as engines read
        memory without regard to streams.

        Raises WeightsMismatch if a parameter has changed in an input of the plan, and
        InvalidArgument if one cannot be sent as it is kept now; both name it. With `quantize`,
        this is a collective of the group and raises at all of its ranks, also InvalidArgument if
        a quantised parameter has a NaN or an infinity.
        """
        refused: Exception | None = None
        try:
            self._follow()
            for name, source in self._copied.items():
                self.tensors[name].copy_(source)
        except Exception as error:
            if self._quantized is None:
                raise
            refused = error
        if self._quantized is not None:
            self._quantized.fill(refused)
        settle(self.tensors.values())
        return self.tensors

    def _follow(self) -> None:
        """Follows parameters to their current memory."""
        rows = self._parameters()
        marks = _marks(rows)
        if marks == self._marks:
            return
        kept = self._keep(rows)
        change = _change(self._kept, kept)
        if change is not None:
            raise WeightsMismatch(
                f"{change} since this rank reported its holdings; begin anew at all ranks: with "
                "weights.forget(model) before push(), or with a new state and a new Trainer"
            )
        self._kept, self._marks = kept, marks
        if self._quantized is not None:
            self._quantized.take(kept.quantized)
        self._take()

    def _take(self) -> None:
        copies = {name: self.tensors[name] for name in self._copied}
        self._copied = {}
        for name, holding in self._kept.holdings.items():
            box, dtype = self._kept.boxes[name], getattr(torch, holding.dtype)
            if box.dtype == dtype and box.is_contiguous():
                self.tensors[name] = box
                continue
            self._copied[name] = box
            copy = copies.get(name)
            if copy is None or copy.device != box.device:
                copy = torch.empty(holding.shape, dtype=dtype, device=box.device)
            self.tensors[name] = copy
        if self._quantized is not None:
            self.tensors.update(self._quantized.tensors)


def _marks(rows: Rows) -> dict[str, object]:
    return {name: _mark(tensor) for name, tensor in rows.items()}


def _mark(tensor: torch.Tensor) -> object:
    """Returns a value that differs if a parameter is in other memory, or is another part of a
    whole; None if that cannot be determined: `_local()` refuses such tensors."""
    local, spec = tensor, None
    if isinstance(tensor, DTensor):
        local, spec = tensor._local_tensor, tensor._spec
        if isinstance(local, AsyncCollectiveTensor):
            local = local.elem
    if not isinstance(local, torch.Tensor) or _is_opaque(local):
        return None
    return (local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), spec)


def _change(before: _Kept, now: _Kept) -> str | None:
    """Describes the change of the first name that has changed; None if none has."""
    for name in sorted(before.tied.keys() | now.tied.keys()):
        was, is_now = (_tied(kept, name) for kept in (before, now))
        if was != is_now:
            return f"{name} was {was}, and is {is_now}"
    forms = [_forms(before), _forms(now)]
    for name in sorted(forms[0].keys() | forms[1].keys()):
        was, is_now = (of.get(name, "absent") for of in forms)
        if was != is_now:
            return f"{name} was {was}, and is {is_now}"
    return None


def _tied(kept: _Kept, name: str) -> str:
    return f"tied to {kept.tied[name]}" if name in kept.tied else "not tied"


def _forms(kept: _Kept) -> dict[str, str]:
    """Describes how each parameter is sent."""
    plain = {
        name: _form(each.dtype, each.whole, Box(each.offset, each.shape))
        for name, each in kept.holdings.items()
    }
    return plain | {each.name: _form(*each.kind) for each in kept.quantized}


def _form(how: object, whole: tuple[int, ...], box: Box) -> str:
    part = "" if box.shape == whole else f", box {list(box.shape)} at {list(box.offset)}"
    return f"{how} of {list(whole)}{part}"


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for the current streams of GPUs, as engines read memory without regard to streams."""
    for device in {each.device for each in tensors}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def state_of(
    parameters: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Rename = lambda name: name,
    sent_as: SentAs = lambda _, dtype: dtype,
    quantize: Quantize | None = None,
    group: Group | None = None,
    host: str = "",
    zone: str = "",
    nics: int = 1,
) -> TrainingState:
    """Returns the state of this rank.

    Arguments:
        parameters: a module, whose parameters and persistent buffers are taken, or tensors by name.
            A tensor that is not a DTensor is a whole parameter. A rank omits parameters that it has
            no part of, such as those of another stage or expert. The state keeps the module or the
            mapping, and reads it at each push, so pass the parameters themselves: a detached
            tensor, as in `module.state_dict()`, stays in the memory that it was made in.
        rename: gets names without the prefixes of wrappers.
        sent_as: such as `lambda name, dtype: "bfloat16"`, for weights that are kept in float32.
        quantize: selects the parameters that are sent in 8 bits with scales, and their format, such
            as `quantized_for_vllm(config)`. All ranks of the group then call this, and `staged()`.
        group: with `quantize`, all ranks that have a part of a quantised parameter. None means the
            default group, or this rank alone if torch.distributed has none.
        host, zone, nics: as in Holdings.

    Raises InvalidArgument that names a parameter which cannot be sent as it is kept.
    """
    return state_from(
        lambda: parameters,
        rename=rename,
        sent_as=sent_as,
        quantize=quantize,
        group=group,
        place=Holdings((), host=host, zone=zone, nics=nics),
    )


def state_from(
    source: Callable[[], torch.nn.Module | Mapping[str, torch.Tensor] | None],
    *,
    rename: Rename,
    sent_as: SentAs,
    quantize: Quantize | None,
    group: Group | None = None,
    place: Holdings = _NO_PLACE,
) -> TrainingState:
    """Does the same as state_of(), for a source that need not keep the module alive."""

    def parameters() -> Rows:
        found = source()
        if found is None:
            raise InvalidArgument("the module of these weights was freed; keep it during pushes")
        return _rows(found, rename)

    def keep(rows: Rows) -> _Kept:
        return _kept(rows, sent_as, quantize)

    state = TrainingState(parameters, keep, group, quantize is not None, place)
    state.staged()
    return state


def _rows(parameters: torch.nn.Module | Mapping[str, torch.Tensor], rename: Rename) -> Rows:
    rows: Rows = {}
    for known, tensor in _named(parameters):
        name = rename(_without_wrappers(known))
        if name is None:
            continue
        if name in rows:
            raise InvalidArgument(
                f"{name} is the name of two parameters, the second being {known}; rename or drop "
                "one of them"
            )
        rows[name] = tensor
    return rows


def _kept(rows: Rows, sent_as: SentAs, quantize: Quantize | None) -> _Kept:
    kept = _Kept({}, {}, [], {})
    first: dict[object, str] = {}
    for name, tensor in rows.items():
        local, box, whole = _local(name, tensor)
        how = None if quantize is None else quantize(name, whole)
        same = first.setdefault((_identity(tensor, local, box), how), name)
        if same != name:
            kept.tied[name] = same
            if how is not None:
                kept.tied[name + how.suffix] = same + how.suffix
            continue
        if how is not None:
            if name + how.suffix in rows:
                raise InvalidArgument(
                    f"{name + how.suffix} is a parameter, and the name of the scales of {name}; "
                    "rename or drop it"
                )
            if box != NOTHING:
                kept.quantized.append(Source(name, Kind(how, whole, box), local))
            continue
        dtype = _sendable(name, sent_as(name, _name_of(local.dtype)))
        if box == NOTHING:
            continue
        kept.boxes[name] = local.reshape(box.shape) if local.dim() == 0 else local
        kept.holdings[name] = Holding(name, dtype, whole, box.offset, box.shape)
    return kept


def _named(
    parameters: torch.nn.Module | Mapping[str, torch.Tensor],
) -> Iterable[tuple[str, torch.Tensor]]:
    if not isinstance(parameters, torch.nn.Module):
        return parameters.items()
    module = parameters
    while isinstance(module, DistributedDataParallel):
        module = module.module
    for name, each in module.named_modules():
        if isinstance(each, FullyShardedDataParallel):
            raise InvalidArgument(
                f"the module {name or type(module).__name__!r} is FullyShardedDataParallel, which "
                "flattens parameters; use fully_shard(), or give names and DTensors"
            )
    # keep_vars: two names of one parameter are one object, even if its shard is empty.
    state = module.state_dict(keep_vars=True)
    return [(name, each) for name, each in state.items() if not name.endswith(_EXTRA_STATE)]


def _without_wrappers(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


@torch.no_grad()
def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box, tuple[int, ...]]:
    """Returns the memory of this rank, its box, and the whole shape."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__}; give tensors, or drop it")
    whole = tuple(tensor.shape) or (1,)
    if 0 in whole:
        raise InvalidArgument(f"{name} has the shape {list(whole)}, without an element; drop it")
    local, box = tensor.detach(), Box((0,) * len(whole), whole)
    if isinstance(local, DTensor):
        mesh, placements, spec = local.device_mesh, local.placements, local._spec
        coordinate = mesh.get_coordinate()
        local = local.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if spec.shard_order not in (None, spec.compute_default_shard_order(placements)):
            raise InvalidArgument(
                f"{name} is split in the order {spec.shard_order}; redistribute it to "
                f"{list(placements)} in the order of the mesh"
            )
        box = NOTHING
        if coordinate is not None:
            here = tuple(local.shape) or (1,)
            box = box_of(name, whole, tuple(mesh.shape), tuple(coordinate), placements, here)
    if _is_opaque(local):
        raise InvalidArgument(
            f"{name} is a {type(local).__name__} of the layout {local.layout}; give its plain "
            "tensors, by the names that the checkpoint has for them"
        )
    if local.is_meta:
        raise InvalidArgument(f"{name} is on the device 'meta', without memory; load it first")
    if local.numel() and local.untyped_storage().nbytes() == 0:
        raise InvalidArgument(f"{name} has no memory: it was freed; load it again before a push")
    return local, box, whole


def _is_opaque(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor are not in its memory."""
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return wrapper or tensor.layout is not torch.strided


def _identity(tensor: torch.Tensor, local: torch.Tensor, box: Box) -> object:
    """Returns a value that is equal for names of one storage."""
    if box == NOTHING:
        return id(tensor)
    memory = (local.device, local.data_ptr(), tuple(local.stride()), local.dtype)
    return (*memory, tuple(tensor.shape), box)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sendable(name: str, dtype: str) -> str:
    if dtype not in ITEM_BYTES:
        raise InvalidArgument(
            f"{name} has the dtype {dtype!r}, which is not sent; drop it by `rename`, or "
            f"choose one of {', '.join(ITEM_BYTES)} by `sent_as`"
        )
    return dtype
