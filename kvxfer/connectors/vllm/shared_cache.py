"""The KV cache of a vLLM on CPUs as memory that peers on this host can map."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvxfer.engine import alloc_shared
from kvxfer.errors import KvxferError


class SharedCache(TorchFunctionMode):
    """A mode of torch that allocates vLLM's KV cache in host memory as shared memory
    (kvxfer.engine.alloc_shared). A peer that cannot map a cache reads it with process_vm_readv,
    which is slower for small pages.

    vLLM's `allocate_kv_cache` makes one allocation for all layers: `torch.zeros(bytes,
    dtype=torch.int8, device=...)`. Everything else is left to torch. So is the cache if there is no
    shared memory, with a warning to `log`.
    """

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.zeros and _is_cache(args, options):
            [nbytes] = args
            try:
                return torch.frombuffer(alloc_shared(nbytes), dtype=torch.int8)
            except KvxferError as error:
                self._log.warning(
                    "peers on this host cannot map the KV cache, and read it more slowly: %s",
                    error,
                )
        return func(*args, **options)


def _is_cache(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    return (
        len(args) == 1
        and isinstance(args[0], int)
        and args[0] > 0
        and options == {"dtype": torch.int8, "device": torch.device("cpu")}
    )
