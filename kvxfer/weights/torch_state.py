"""What a training rank holds: from a module of torch, or names and tensors; DTensors by their
placements.

Nothing is gathered. A rank says which box of each parameter it has, and sends from the memory where
it has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvxfer.errors import InvalidArgument
from kvxfer.layout import ITEM_BYTES
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.quantize import Quantize
from kvxfer.weights.quantized import Group, QuantizedCopies, Source
from kvxfer.weights.scale_exchange import Kind
from kvxfer.weights.torch_boxes import NOTHING, Box, box_of

Rename: TypeAlias = Callable[[str], str | None]
"""The name of a parameter in the checkpoint; None where it is not sent."""
SentAs: TypeAlias = Callable[[str, str], str]
"""Of a parameter's name in the checkpoint and its dtype: the dtype in which it is sent."""

_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing add to names."""
_EXTRA_STATE: Final = "_extra_state"


class TrainingState:
    """Of one rank. Any thread, one at a time.

    The memory of parameters is taken down once. What replaces it makes the state invalid:
    `module.to()`, `load_state_dict(assign=True)`. Optimizers, and FSDP's forward and backward, keep
    it.
    """

    def __init__(
        self,
        holdings: Holdings,
        tensors: dict[str, torch.Tensor],
        copied: Mapping[str, torch.Tensor],
        quantized: QuantizedCopies | None = None,
    ) -> None:
        self.holdings = holdings
        self.tensors: Final = tensors
        """For each name of the holdings the box: contiguous, and read where it is."""
        self._copied, self._quantized = copied, quantized

    @property
    def copied(self) -> frozenset[str]:
        """Names whose tensor is a copy: not contiguous at training, sent in another dtype, or
        quantised; and scales."""
        made = () if self._quantized is None else self._quantized.tensors
        return frozenset([*self._copied, *made])

    @torch.no_grad()
    def staged(self) -> dict[str, torch.Tensor]:
        """`tensors`, once the copies are up to date: of each push, as Trainer's `tensors`. On a
        GPU, once its current stream has come so far: engines read memory, and know no streams.

        With `quantize`, a collective of the group. Raises InvalidArgument at all its ranks, with
        the name of a quantised parameter that has a NaN or an infinity.
        """
        for name, source in self._copied.items():
            self.tensors[name].copy_(source)
        if self._quantized is not None:
            self._quantized.fill()
        settle(self.tensors.values())
        return self.tensors


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for the current streams of their GPUs: engines read memory, and know no streams."""
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
    """Of this rank.

    Arguments:
        parameters: a module, whose parameters and persistent buffers are taken, or tensors by name.
            A tensor that is no DTensor is a whole parameter. A rank that has nothing of a
            parameter, as of another stage or another expert, does not name it.
        rename: is told names without the prefixes of wrappers.
        sent_as: such as `lambda name, dtype: "bfloat16"`, for weights that are kept in float32.
        quantize: says which parameters are sent in 8 bits with scales, and how, such as
            `linear_weights(FP8_BLOCKS)`. All ranks of the group then call this, and `staged()`.
        group: with `quantize`, all ranks that have a part of what is quantised. None for the
            default group, or for this rank alone where torch.distributed has none.
        host, zone, nics: as in Holdings.

    Raises InvalidArgument, with the parameter's name, for what cannot be sent as it is kept.
    """
    rows: dict[str, torch.Tensor] = {}
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

    holdings: list[Holding] = []
    tensors: dict[str, torch.Tensor] = {}
    copied: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    sources: list[Source] = []
    for name, tensor in rows.items():
        local, box, whole = _local(name, tensor)
        how = None if quantize is None else quantize(name, whole)
        same = first.setdefault((_identity(tensor, local, box), how), name)
        if same != name:
            tied[name] = same
            if how is not None:
                tied[name + how.suffix] = same + how.suffix
            continue
        if how is not None:
            if name + how.suffix in rows:
                raise InvalidArgument(
                    f"{name + how.suffix} is a parameter, and the name of the scales of {name}; "
                    "rename or drop it"
                )
            if box != NOTHING:
                sources.append(Source(name, Kind(how, whole, box), local))
            continue
        kept = _name_of(tensor.dtype)
        dtype = _sendable(name, sent_as(name, kept))
        if box == NOTHING:
            continue
        source = local.reshape(box.shape) if local.dim() == 0 else local
        if dtype == kept and source.is_contiguous():
            tensors[name] = source
        else:
            copied[name] = source
            tensors[name] = torch.empty(
                box.shape, dtype=getattr(torch, dtype), device=source.device
            )
        holdings.append(Holding(name, dtype, whole, box.offset, box.shape))
    quantized = None if quantize is None else QuantizedCopies(sources, group)
    if quantized is not None:
        holdings += quantized.holdings
        tensors |= quantized.tensors
    state = TrainingState(
        Holdings(tuple(holdings), tied, nics=nics, host=host, zone=zone),
        tensors,
        copied,
        quantized,
    )
    state.staged()
    return state


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
    # Of keep_vars: two names of one parameter are one object, even where its shard is empty.
    state = module.state_dict(keep_vars=True)
    return [(name, each) for name, each in state.items() if not name.endswith(_EXTRA_STATE)]


def _without_wrappers(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


@torch.no_grad()
def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box, tuple[int, ...]]:
    """The memory of this rank, its box, and the whole shape."""
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
    wrapper: bool = is_traceable_wrapper_subclass(local)
    if wrapper or local.layout is not torch.strided:
        raise InvalidArgument(
            f"{name} is a {type(local).__name__} of the layout {local.layout}; give its plain "
            "tensors, by the names that the checkpoint has for them"
        )
    if local.is_meta:
        raise InvalidArgument(f"{name} is on the device 'meta', without memory; load it first")
    return local, box, whole


def _identity(tensor: torch.Tensor, local: torch.Tensor, box: Box) -> object:
    """Equal for names of one storage."""
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
