"""The collective of processes on one host, by torch's gloo over loopback."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, FileStore

from kvxfer.reference.shards import Shard


class GlooCollective:
    """A process group apart from torch's default one, which a program may use for other things.

    A call raises RuntimeError at once if another rank has ended, and after `step_seconds` if one
    does not take part.
    """

    def __init__(
        self, meeting: Path, shard: Shard, start_seconds: float, step_seconds: float
    ) -> None:
        """Returns once all ranks have joined. `meeting` is a file that no rank has used before.
        Raises RuntimeError if one does not join within `start_seconds`."""
        self.shard = shard
        start = datetime.timedelta(seconds=start_seconds)
        store = FileStore(str(meeting), shard.ranks)
        store.set_timeout(start)
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = start
        self._group = gloo(store, shard.rank, shard.ranks, options)
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.timeout = self._gather.timeout = datetime.timedelta(seconds=step_seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        # gloo sums in a ring: each element in an order of ranks that depends only on its place.
        self._group.allreduce([x], self._reduce).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.shard.ranks)]
        self._group.allgather([parts], [x], self._gather).wait()
        return torch.cat(parts, dim=-1)
