"""The push of a model from a PyTorch training loop, in one call."""

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
from kvxfer.weights.torch_state import Rename, SentAs, TrainingState, state_from
from kvxfer.weights.trainer import Push, Trainer
from kvxfer.weights.training_ranks import at_all_ranks
from kvxfer.weights.transfer.settings import UpdateSettings

_lock: Final = threading.Lock()
_trainers: Final[weakref.WeakKeyDictionary[nn.Module, Trainer]] = weakref.WeakKeyDictionary()


def push(
    model: nn.Module,
    version: int,
    *,
    receivers: Sequence[str] = (),
    instances: int = 1,
    wait_seconds: float = 120.0,
    rename: Rename = lambda name: name,
    sent_as: SentAs = lambda _, dtype: dtype,
    quantize: Quantize | None = None,
    settings: UpdateSettings | None = None,
    **options: Unpack[EngineOptions],
) -> Push:
    """Sends a model's weights as a version, from all ranks of torch.distributed's default group, or
    from this process alone if there is none. Every rank calls it after each step that is to be
    served:

        push = weights.push(model, version, receivers=addresses)
        push.read()        # the next step may change the parameters
        push.result()      # all instances serve the version

    The first call for a model makes the rank's TrainingState and Trainer, and keeps them. Later
    calls ignore all arguments but the model and the version. `forget(model)`, called at all ranks,
    ends both; the next call begins anew. To hold these objects yourself, make them with
    `state_of()` and `Trainer`.

    Arguments:
        receivers: addresses of inference ranks, which rank 0 dials. Others dial rank 0 (options:
            `host` and `port`).
        instances: the number of inference instances that the first call waits for.
        wait_seconds: the longest time that it waits for them.
        rename, sent_as, quantize: as in `state_of()`.
        settings: deadlines and policies of the updates, used at rank 0.
        options: those of the transfer engines. The cluster key comes from the environment
            (KVXFER_CLUSTER_KEY).

    Each call follows parameters to other memory, and refuses parameters that differ from those of
    the first call (TrainingState). A push that one rank cannot make fails at all ranks.

    Raises InvalidArgument, and WeightsMismatch that names a parameter which has changed. The first
    call also raises DeadlineExceeded if instances do not join, AuthenticationFailed at once if one
    has another cluster key, and what Trainer raises.
    """
    with _lock:
        trainer = _trainers.get(model)
        if trainer is None:
            trainer = _begun(
                weakref.ref(model),
                (rename, sent_as, quantize),
                instances,
                wait_seconds,
                {"receivers": receivers, "settings": settings, **options},
            )
            _trainers[model] = trainer
    return trainer.push(version)


def forget(model: nn.Module) -> None:
    """Closes what push() has made for a model, and ends an update that is under way."""
    with _lock:
        trainer = _trainers.pop(model, None)
    if trainer is not None:
        trainer.close()


def _begun(
    model: weakref.ref[nn.Module],
    chosen: tuple[Rename, SentAs, Quantize | None],
    instances: int,
    wait_seconds: float,
    options: dict[str, Any],
) -> Trainer:
    """Prepares the first push of a model. All ranks take the same steps, and fail together."""
    rename, sent_as, quantize = chosen
    rank, ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    states: list[TrainingState] = []
    trainers: list[Trainer] = []

    def hold() -> None:
        states.append(state_from(model, rename=rename, sent_as=sent_as, quantize=quantize))

    def begin(coordinator: str | None = None) -> str:
        trainer = Trainer(
            states[0].holdings,
            states[0].staged,
            rank=rank,
            world_size=ranks,
            cluster_key=read_cluster_key(),
            coordinator=coordinator,
            **options,
        )
        trainers.append(trainer)
        return trainer.coordinator

    try:
        at_all_ranks(hold)
        coordinator = at_all_ranks(lambda: begin() if rank == 0 else "")[0]
        options["receivers"] = ()
        at_all_ranks(lambda: begin(coordinator) if rank else "")
        at_all_ranks(lambda: None if rank else trainers[0].wait_for(instances, wait_seconds))
    except BaseException:
        for trainer in trainers:
            trainer.close()
        raise
    return trainers[0]
