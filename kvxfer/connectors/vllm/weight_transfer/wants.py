"""The boxes of a checkpoint's parameters that a worker of a live vLLM needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_MODULES
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from kvxfer.errors import KvxferError, WeightsMismatch
from kvxfer.weights.holdings import Holding
from kvxfer.weights.window import Wants, written_by

_SHOWN: Final = 5


def record_wants(model: torch.nn.Module, checkpoint: Sequence[ParamMeta]) -> tuple[Holding, ...]:
    """Returns the boxes that the model's own `load_weights` reads of a checkpoint, sorted by name,
    without those that it ignores. The model serves afterwards as before.

    Raises WeightsMismatch if a parameter of the model would not be filled, if the model has no
    place for a name, such as one of scales, and if it would take 8-bit weights without scales.
    """
    wants = Wants()
    given: list[str] = []

    def windows() -> Iterator[tuple[str, torch.Tensor]]:
        for each in checkpoint:
            given.append(each.name)
            yield each.name, wants.window(each.name, each.dtype, each.shape)

    with torch.no_grad(), _in_checkpoint_format(model):
        with _Writes(model) as writes:
            _load(model, windows(), given)
        _check_filled(model, writes)
    return wants.holdings()


def _load(model: Any, windows: Iterator[tuple[str, torch.Tensor]], given: list[str]) -> None:
    try:
        model.load_weights(windows)
    except KvxferError:
        raise
    except Exception as error:  # vLLM's models raise various errors for a name that they lack
        name = given[-1] if given else "no parameter"
        raise WeightsMismatch(
            f"vLLM's {type(model).__name__} refuses {name}: {type(error).__name__}: {error}. Pass "
            "the names of the checkpoint that it loads, and scales for its 8-bit parameters "
            "(kvxfer.weights.quantized_for_vllm)"
        ) from error


@contextlib.contextmanager
def _in_checkpoint_format(model: torch.nn.Module) -> Iterator[None]:
    """Gives the model parameters as its loaders expect them, without memory. Afterwards, puts back
    those that it serves with, untouched."""
    layerwise.initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):
                    # The wrapper would process the layer, whose weights have no memory.
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
        yield
    finally:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch that counts the elements written to each memory, and prevents writes to the
    weights that the model serves with."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = [*model.parameters(), *model.buffers()]
        self._served = {_memory(tensor) for tensor in tensors if not tensor.is_meta}
        self._elements: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """Returns how many elements of this tensor's memory were written."""
        return self._elements.get(_memory(tensor), 0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        served = False
        for tensor in written_by(func, args, kwargs):
            memory = _memory(tensor)
            self._elements[memory] = self._elements.get(memory, 0) + tensor.numel()
            served |= memory in self._served
        return args[0] if served else func(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    """Returns a number that is equal for views of one tensor, also of one without memory."""
    return int(tensor.untyped_storage()._cdata)


def _check_filled(model: torch.nn.Module, writes: _Writes) -> None:
    """Raises WeightsMismatch for parameters that are not filled: vLLM would serve with whatever is
    in their memory."""
    lacking: dict[int, str] = {}
    filled: set[int] = set()
    for prefix, layer in model.named_modules():
        if type(layer).__name__ in SKIP_MODULES:
            continue
        kept = layerwise.get_layerwise_info(layer).kernel_tensors
        for name, parameter in layer._parameters.items():
            if parameter is None or name in SKIP_LOAD_TENSORS:
                continue
            # Tied parameters are one while they serve.
            served = id(kept[0].get(name)) if kept else id(parameter)
            written, needed = writes.of(parameter), get_tensor_load_numel(parameter)
            if written >= needed:
                filled.add(served)
            elif not is_deferred_attention_layer(layer):  # the scales of a cache have defaults
                full = f"{prefix}.{name}" if prefix else name
                lacking[served] = f"{full} ({written} of {needed} elements)"
    names = [text for served, text in lacking.items() if served not in filled]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise WeightsMismatch(
            f"the trainer's parameters do not fill {', '.join(names[:_SHOWN])}{more}; pass the "
            "names of the checkpoint that vLLM loads, and all of them"
        )
