"""What all workers of a vLLM instance do, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch.distributed
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvxfer.errors import WeightUpdateError

# vLLM shows what its own loggers tell; of others only warnings.
_LOG: Final = logging.getLogger("vllm.kvxfer")


def together(parallel_config: Any, step: Callable[[], None], undo: Callable[[], None]) -> None:
    """Takes a step that may fail on any worker; where it does, all undo it. Called by all.

    The last worker alone raises. vLLM 0.32 reads the answers of workers in the order of their ranks
    and stops at an error, so it would take what later ranks have answered for their answers to its
    next call, and so on for ever.
    """
    failed: Exception | None = None
    try:
        step()
    except Exception as error:
        failed = error
    text = _first(None if failed is None else f"{type(failed).__name__}: {failed}")
    if text is None:
        return
    _LOG.warning("kvxfer: %s", text)
    undo()
    if parallel_config.rank == parallel_config.world_size - 1:
        raise WeightUpdateError(text) from failed


def _first(text: str | None) -> str | None:
    """What one of the workers says, the same for all of them; None if none says anything."""
    for group in (get_tp_group(), get_pp_group()):
        said: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(said, text, group=group.cpu_group)
        text = next((each for each in said if each is not None), None)
    return text
