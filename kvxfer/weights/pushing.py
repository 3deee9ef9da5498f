"""One call from a training loop of PyTorch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, Unpack

import torch
from torch import nn

from kvxfer.cluster_key import read_cluster_key
from kvxfer.engine import EngineOptions
from kvxfer.weights.quantize import Quantize
from kvxfer.weights.torch_state import Rename, SentAs, state_of
from kvxfer.weights.trainer import Push, Trainer
from kvxfer.weights.transfer.settings import UpdateSettings

_JOIN_SECONDS: Final = 120.0

_lock: Final = threading.Lock()
_trainers: Final[weakref.WeakKeyDictionary[nn.Module, Trainer]] = weakref.WeakKeyDictionary()


def push(
    model: nn.Module,
    version: int,
    *,
    receivers: Sequence[str] = (),
    instances: int = 1,
    rename: Rename = lambda name: name,
    sent_as: SentAs = lambda _, dtype: dtype,
    quantize: Quantize | None = None,
    settings: UpdateSettings | None = None,
    **options: Unpack[EngineOptions],
) -> Push:
    """Sends a model's weights as a version, from all ranks of torch.distributed's default group, or
    from this process alone where there is none. Every rank calls it after every step that is to be
    served:

        push = weights.push(model, version, receivers=addresses)
        push.read()        # the next step may change the parameters
        push.result()      # all instances serve the version

    The first call for a model makes a Trainer, and waits until so many inference instances have
    joined; it keeps the other arguments of that call. receivers: addresses of inference ranks, at
    rank 0; others dial it (options: `host` and `port`). rename, sent_as,
    quantize: as of `torch_state.state_of()`. The cluster key is that of the environment
    (KVXFER_CLUSTER_KEY).

    Raises InvalidArgument, DeadlineExceeded where the instances do not come, and what Trainer
    raises; at every rank where a quantised parameter has a NaN or an infinity. `forget(model)`
    ends the Trainer.
    """
    with _lock:
        trainer = _trainers.get(model)
        if trainer is None:
            state = state_of(model, rename=rename, sent_as=sent_as, quantize=quantize)
            trainer = _trainer(
                holdings=state.holdings,
                tensors=state.staged,
                receivers=receivers,
                settings=settings,
                **options,
            )
            _trainers[model] = trainer
            if _rank() == 0:
                trainer.wait_for(instances, _JOIN_SECONDS)
    return trainer.push(version)


def forget(model: nn.Module) -> None:
    """Ends what push() has made for a model, and an update that is under way."""
    with _lock:
        trainer = _trainers.pop(model, None)
    if trainer is not None:
        trainer.close()


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _trainer(**arguments: Any) -> Trainer:
    """Of this rank; rank 0 tells the others where its coordinator is."""
    arguments |= {"cluster_key": read_cluster_key(), "rank": _rank(), "world_size": 1}
    if not torch.distributed.is_initialized():
        return Trainer(**arguments)
    arguments["world_size"] = torch.distributed.get_world_size()
    address: list[Any] = [None]
    leader: Trainer | None = None
    if arguments["rank"] == 0:
        leader = Trainer(**arguments)
        address = [leader.coordinator]
    torch.distributed.broadcast_object_list(address, src=0)
    if leader is not None:
        return leader
    return Trainer(**{**arguments, "coordinator": address[0], "receivers": ()})
