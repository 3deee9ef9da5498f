"""vLLM's TrainerWeightTransferEngine of the backend `kvxfer`, one for each training rank."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from kvxfer.cluster_key import as_cluster_key, read_cluster_key
from kvxfer.connectors.vllm.weight_transfer.control_path import ControlPath
from kvxfer.connectors.vllm.weight_transfer.infos import KvxferTrainerInitInfo
from kvxfer.errors import InvalidArgument, WeightUpdateError
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.torch_state import TrainingState, settle
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.training_ranks import at_all_ranks

logger = logging.getLogger(__name__)

__all__ = ["KvxferTrainerWeightTransferEngine", "ShardSource", "StateSource"]


class ShardSource(WeightSource):
    """A source of the shards that this rank holds: nothing is gathered."""

    @abc.abstractmethod
    def holdings(self) -> Holdings:
        """Returns the boxes of this rank, by the names of the checkpoint."""

    @abc.abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Returns the current contents of these boxes, contiguous."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise InvalidArgument("a source of shards has no whole parameters; use it with kvxfer only")


class StateSource(ShardSource):
    """The source of a state from `kvxfer.weights.torch_state.state_of()` for this rank's module:
    FSDP's and other DTensors are sent as they are sharded."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def metadata(self) -> list[ParamMeta]:
        """Returns the metadata of the parameters that this rank has a part of."""
        return [
            ParamMeta(each.name, getattr(torch, each.dtype), each.whole)
            for each in self._state.holdings.parameters
        ]

    def holdings(self) -> Holdings:
        return self._state.holdings

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._state.staged()


class KvxferTrainerWeightTransferEngine(TrainerWeightTransferEngine[KvxferTrainerInitInfo]):
    """The weight updates of one training rank. Belongs to one thread of the training loop."""

    init_info_cls = KvxferTrainerInitInfo

    def __init__(
        self,
        init_info: KvxferTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.version = init_info.version
        """The version of the last update that was sent."""
        self._trainer = _trainer(init_info, client, source)
        metadata = _of_all_ranks(source, init_info)
        if self.is_sender:
            try:
                client.init_weight_transfer_engine(_told(metadata, self._trainer.coordinator))
                self._trainer.wait_for(init_info.instances, init_info.join_seconds)
            except BaseException:
                self._trainer.close()
                raise

    @classmethod
    def trainer_init(
        cls,
        init_info: KvxferTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Makes the engine; every training rank calls this. On rank 0 it returns when the workers
        of vLLM have joined its coordinator. Raises InvalidArgument, DeadlineExceeded, and what
        `client` raises."""
        if source is None:
            raise InvalidArgument("there is no source of weights; pass ModuleSource(model)")
        return cls(init_info, client=client, source=source)

    def send_weights(self, version: int | None = None) -> UpdateReport:
        """Sends the source's weights as the next version, or as the given one. Every training rank
        calls this; it returns when vLLM serves them. vLLM serves while they are sent: the client
        should pause it only between start_weight_update() and finish_weight_update()
        (`clients.PausingClient`).

        Raises WeightUpdateAborted if nothing was applied: vLLM serves the previous weights. Raises
        WeightsMismatch if the same update would be refused again, also if another rank cannot send
        its parameters. Raises WeightUpdateError if no instance has applied the update: none is in
        service any more.
        """
        version = self.version + 1 if version is None else version
        report = self._trainer.push(version).result()
        self.version = version
        failed = [each for each in report.instances if each.state != "committed"]
        for each in failed:
            logger.warning("%s is out of service: %s", each.instance_id, each.error)
        if failed and len(failed) == len(report.instances):
            raise WeightUpdateError(
                f"no instance serves version {version}; restart vLLM with it. "
                f"{failed[0].instance_id}: {failed[0].error}"
            )
        return report

    def shutdown(self) -> None:
        """Ends the coordinator and the transfer engines; vLLM continues to serve."""
        self._trainer.close()


_FROM_TORCH: Final = "broadcast by torch.distributed"


def _trainer(
    info: KvxferTrainerInitInfo, client: VLLMWeightSyncClient, source: WeightSource
) -> Trainer:
    def begun(coordinator: str | None) -> Trainer:
        return Trainer(
            _holdings(source),
            lambda: _tensors(source),
            rank=info.rank,
            world_size=info.world_size,
            cluster_key=as_cluster_key(info.cluster_key)
            if info.cluster_key
            else read_cluster_key(),
            coordinator=coordinator,
            control_path=ControlPath(client) if info.is_sender else None,
            settings=info.settings,
            **info.options,
        )

    if info.world_size == 1 or info.coordinator is not None:
        return begun(info.coordinator)
    if not torch.distributed.is_initialized():
        raise InvalidArgument(
            f"training rank {info.rank} of {info.world_size} has no coordinator: pass the address "
            "that rank 0's engine has, or initialise torch.distributed, which broadcasts it"
        )
    made: list[Trainer] = []

    def begin(coordinator: str | None) -> str:
        made.append(begun(coordinator))
        return made[0].coordinator

    try:
        told = at_all_ranks(lambda: begin(None) if info.is_sender else "")[0]
        at_all_ranks(lambda: "" if info.is_sender else begin(told))
    except BaseException:
        for trainer in made:
            trainer.close()
        raise
    return made[0]


def _holdings(source: WeightSource) -> Holdings:
    """Returns this rank's holdings: with a source of whole parameters, those that it holds here."""
    if isinstance(source, ShardSource):
        return source.holdings()
    held = source.held_names()
    return Holdings(
        tuple(
            Holding(
                each.name,
                str(each.dtype).removeprefix("torch."),
                tuple(each.shape) or (1,),
                (0,) * max(1, len(each.shape)),
                tuple(each.shape) or (1,),
            )
            for each in source.metadata()
            if held is None or each.name in held
        )
    )


def _tensors(source: WeightSource) -> dict[str, torch.Tensor]:
    if isinstance(source, ShardSource):
        found = dict(source.tensors())
    else:
        whole: Iterator[tuple[str, torch.Tensor | None]] = iter(source)  # held elsewhere if None
        found = {name: each.detach().contiguous() for name, each in whole if each is not None}
    settle(found.values())
    return found


def _of_all_ranks(source: WeightSource, info: KvxferTrainerInitInfo) -> list[ParamMeta]:
    """Returns the metadata of all ranks' parameters. A source of shards knows only those of its
    rank, which are not all with pipeline or expert parallelism."""
    mine: list[ParamMeta] = source.metadata()
    if not isinstance(source, ShardSource) or info.world_size == 1:
        return mine
    if not torch.distributed.is_initialized():
        return mine
    found: list[list[ParamMeta]] = [[] for _ in range(info.world_size)]
    torch.distributed.all_gather_object(found, mine)
    return list({each.name: each for ranks in found for each in ranks}.values())


def _told(metadata: list[ParamMeta], coordinator: str) -> dict[str, Any]:
    """Returns the values of each worker's KvxferInitInfo."""
    return {
        "coordinator": coordinator,
        "names": [each.name for each in metadata],
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in metadata],
        "shapes": [list(each.shape) for each in metadata],
    }
