"""The messages of a trainer to the workers of a vLLM instance, over vLLM's own control path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from kvxfer.connectors.vllm.weight_transfer.plugin import BACKEND
from kvxfer.engine import EngineOptions
from kvxfer.errors import InvalidArgument
from kvxfer.weights.transfer.settings import UpdateSettings


@dataclass
class KvxferInitInfo(WeightTransferInitInfo):
    """The address of the job's coordinator, and the trainer's parameters. The cluster key is not
    included: each side gets it from its operator."""

    coordinator: str
    names: list[str]
    dtypes: list[str]
    """Dtypes as torch names them, without `torch.`."""
    shapes: list[list[int]]
    """Shapes of whole parameters."""

    def checkpoint(self) -> list[ParamMeta]:
        """Returns the parameters. Raises InvalidArgument."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidArgument(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes "
                "of parameters; pass one of each for every parameter"
            )
        found = []
        for name, text, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype = getattr(torch, text, None)
            if not isinstance(dtype, torch.dtype):
                raise InvalidArgument(f"{name} has the dtype {text!r}, which torch does not know")
            found.append(ParamMeta(name, dtype, tuple(shape)))
        return found


@dataclass
class KvxferUpdateInfo(WeightTransferUpdateInfo):
    """A step of a staged update."""

    action: str
    """"pin": the update that this worker has staged is the one to apply, and nothing drops it any
    more. "unpin": whatever is pinned is dropped, and finishing applies nothing."""
    update_id: str = ""


@dataclass
class KvxferTrainerInitInfo(TrainerInitInfo):
    """The settings of one training rank."""

    backend: ClassVar[str] = BACKEND

    world_size: int = 1
    """Training ranks of the job."""
    coordinator: str | None = None
    """The address that rank 0's engine reports. None: torch.distributed broadcasts it to the other
    ranks."""
    instances: int = 1
    """vLLM instances that the client drives; data parallel ranks count as instances."""
    version: int = 0
    """The version that vLLM serves now. The first update has the next one."""
    cluster_key: str | None = None
    """The cluster key. None: KVXFER_CLUSTER_KEY."""
    join_seconds: float = 120.0
    """Seconds until all instances must be connected."""
    settings: UpdateSettings = field(default_factory=UpdateSettings)
    options: EngineOptions = field(default_factory=EngineOptions)
    """Options of the transfer engines: `host`, `fabrics`, …"""
