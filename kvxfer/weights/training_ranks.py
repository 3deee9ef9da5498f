"""Steps that the training ranks of torch.distributed's default group take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kvxfer.weights.transfer.messages import Said, said

T = TypeVar("T")


def at_all_ranks(step: Callable[[], T]) -> list[T]:
    """Runs the step at all ranks and returns the result of each; in this process alone if there is
    no group. Results have to be picklable. If the step raises at one rank, this raises at all."""
    told: list[tuple[T | None, Said | None]] = []
    error: Exception | None = None
    try:
        told.append((step(), None))
    except Exception as failed:
        error = failed
        told.append((None, said(failed)))
    if torch.distributed.is_initialized():
        told *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, told[0])
    if error is not None:
        raise error
    for rank, (_, why) in enumerate(told):
        if why is not None:
            raise Said(why.code, f"training rank {rank}: {why.text}").error()
    return [given for given, _ in told]  # type: ignore[misc]
