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

    A call raises RuntimeError at once where another rank has ended, and after `step_seconds` where
    it does not take part.
    """

    def __init__(
        self, meeting: Path, shard: Shard, start_seconds: float, step_seconds: float
    ) -> None:
        """Returns once all ranks are here. `meeting` is a file that none of them has used before.
        Raises RuntimeError where one does not come."""
        self.shard = shard
        start = datetime.timedelta(seconds=start_seconds)
        store = FileStore(str(meeting), shard.ranks)
        store.set_timeout(start)
        gloo: Any = dist.ProcessGroupGloo  # torch describes little of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = start
        self._group = gloo(store, shard.rank, shard.ranks, options)
        self._reduce, self._gather = AllreduceOptions(), AllgatherOptions()
        self._reduce.timeout = self._gather.timeout = datetime.timedelta(seconds=step_seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        # A ring: each element is summed at the ranks in an order that depends on its place alone.
        self._group.allreduce([x], self._reduce).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.shard.ranks)]
        self._group.allgather([parts], [x], self._gather).wait()
        return torch.cat(parts, dim=-1)
