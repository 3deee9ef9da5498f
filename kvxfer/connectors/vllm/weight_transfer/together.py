"""Steps that all workers of a vLLM instance take, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch.distributed
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvxfer.errors import WeightUpdateError

# vLLM shows its own loggers' info messages, and only warnings of others.
_LOG: Final = logging.getLogger("vllm.kvxfer")


def together(parallel_config: Any, step: Callable[[], None], undo: Callable[[], None]) -> None:
    """Takes a step that may fail on any worker; if it does, all undo it. All workers call this.

    Only the last worker raises. vLLM 0.32 reads the answers of workers in the order of their ranks
    and stops at an error. It would take the unread answers of later ranks for their answers to its
    next call, and so on for all calls.
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
    """Returns the text of one worker, the same on all of them; None if no worker has one."""
    for group in (get_tp_group(), get_pp_group()):
        said: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(said, text, group=group.cpu_group)
        text = next((each for each in said if each is not None), None)
    return text
