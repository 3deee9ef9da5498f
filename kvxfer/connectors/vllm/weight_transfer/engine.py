"""vLLM's WeightTransferEngine of the backend `kvxfer`, one for each worker.

The weights of an update are staged in host memory while vLLM serves. vLLM's control path decides:

    start_weight_update          nothing yet
    update_weights {pin}         this worker's vote: it has all of the update, and keeps it
    finish_weight_update         it serves the update from the next step on
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.v1.worker.gpu_worker import Worker

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.vllm.connector import KvxferConnector
from kvxfer.connectors.vllm.weight_transfer.control_path import PIN, UNPIN
from kvxfer.connectors.vllm.weight_transfer.infos import KvxferInitInfo, KvxferUpdateInfo
from kvxfer.connectors.vllm.weight_transfer.member import Member, MemberSettings
from kvxfer.connectors.vllm.weight_transfer.reload import (
    check_reloadable,
    load_in_place,
    windows_over,
)
from kvxfer.connectors.vllm.weight_transfer.together import together
from kvxfer.connectors.vllm.weight_transfer.wants import record_wants
from kvxfer.errors import InvalidArgument, KvxferError, NotStaged, WeightUpdateError
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.transfer.staged import Staged

# vLLM shows its own loggers' info messages, and only warnings of others.
_LOG: Final = logging.getLogger("vllm.kvxfer")


class KvxferWeightTransferEngine(WeightTransferEngine[KvxferInitInfo, KvxferUpdateInfo]):
    """The weight updates of one worker. Belongs to the worker's thread."""

    init_info_cls = KvxferInitInfo
    update_info_cls = KvxferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._member: Member | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pinned: Staged | None = None
        self._given_up = False
        self._version = 0

    def init_transfer_engine(self, init_info: KvxferInitInfo) -> None:
        """Joins the coordinator, with the boxes of the trainer's parameters that this worker's
        model wants. A later call, for another trainer, first leaves the previous coordinator.

        Raises WeightsMismatch if the parameters do not fill the model or vLLM cannot reload it,
        InvalidArgument, and DeadlineExceeded if the coordinator does not answer."""
        self.shutdown()
        together(self.parallel_config, lambda: self._join(init_info), self.shutdown)

    def _join(self, init_info: KvxferInitInfo) -> None:
        settings = MemberSettings.read(self.vllm_config, os.environ.get("KVXFER_HOST"))
        checkpoint = init_info.checkpoint()
        check_reloadable(self.model)
        with set_current_vllm_config(self.vllm_config):
            wanted = record_wants(self.model, checkpoint)
        self._shapes = {each.name: each.shape for each in checkpoint}
        config = self.parallel_config
        name = self.vllm_config.instance_id
        if config.data_parallel_size > 1:
            name = f"{name}-{config.data_parallel_index}"
        member = Member(
            settings,
            Holdings(wanted),
            init_info.coordinator,
            instance_id=name,
            rank=config.rank,
            ranks=config.world_size,
            version=self._version,
        )
        member.begin()
        self._member = member
        nbytes = member.receiver.arena.nbytes
        _LOG.info(
            "kvxfer: %d of %d parameters are wanted, %d bytes", len(wanted), len(checkpoint), nbytes
        )

    def start_weight_update(self) -> None:
        """Gives up an update that an earlier trainer began and did not finish."""
        self._drop()
        self._given_up = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Pins or unpins an update on all workers. Raises WeightUpdateError, on the last worker, if
        any has not staged the update that is to be pinned; then none has pinned it."""
        together(
            self.parallel_config,
            lambda: self.receive_weights(self.parse_update_info(update_info)),
            self._drop,
        )

    def receive_weights(self, update_info: KvxferUpdateInfo) -> None:
        """Pins or unpins an update on this worker. Raises NotStaged."""
        if update_info.action == PIN:
            if self._pinned is not None and self._pinned.update_id == update_info.update_id:
                return  # the client repeats its request
            self._drop()
            self._pinned = self._joined().pin(update_info.update_id)
        elif update_info.action == UNPIN:
            self._drop()
            self._given_up = True
        else:
            raise InvalidArgument(f"action is {update_info.action!r}; pass {PIN!r} or {UNPIN!r}")

    def finish_weight_update(self) -> None:
        """Serves the pinned update from now on. If that fails, this process ends: vLLM would serve
        half of the update. After "unpin" it does nothing.

        Raises NotStaged if nothing is pinned."""
        staged, self._pinned = self._pinned, None
        if staged is None:
            # All workers get here, or none, as they pin together. The last one raises: `together`.
            if self._given_up or self.parallel_config.rank < self.parallel_config.world_size - 1:
                return
            raise NotStaged('no update is pinned; update_weights needs the action "pin" before')
        member = self._joined()
        began = SYSTEM_CLOCK.monotonic()
        try:
            receiver = member.receiver
            windows = windows_over(receiver.arena, receiver.memory, self._shapes)
            load_in_place(self.model, self.model_config, self.device, windows)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            connector = get_kv_transfer_group() if has_kv_transfer_group() else None
            if isinstance(connector, KvxferConnector):
                connector.set_weights_version(staged.version)
        except BaseException as error:
            self._end_process(member, staged, error)
            return
        self._version = staged.version
        try:
            member.applied(staged, SYSTEM_CLOCK.monotonic() - began)
        except (KvxferError, TimeoutError) as error:
            # The coordinator considers this rank lost; it serves the update nevertheless.
            _LOG.warning("kvxfer: version %d is served, unreported: %s", staged.version, error)

    def shutdown(self) -> None:
        member, self._member, self._pinned = self._member, None, None
        if member is not None:
            member.close()

    def _joined(self) -> Member:
        if self._member is None:
            raise WeightUpdateError(
                "this worker has joined no coordinator; call init_weight_transfer_engine first"
            )
        return self._member

    def _drop(self) -> None:
        staged, self._pinned = self._pinned, None
        if staged is not None and self._member is not None:
            try:
                self._member.unpin(staged)
            except (KvxferError, TimeoutError) as error:  # not all ranks may raise: `together`
                _LOG.warning("kvxfer: %s is dropped, unreported: %s", staged.update_id, error)

    def _end_process(self, member: Member, staged: Staged, error: BaseException) -> None:
        _LOG.critical(
            "kvxfer: weights version %d was applied in part (%s); this worker ends, as it would "
            "serve with the weights of two versions",
            staged.version,
            error,
            exc_info=error,
        )
        with contextlib.suppress(Exception):
            member.broken(staged, error)
            member.close()
        # vLLM catches every exception of a worker and continues.
        os.kill(os.getpid(), signal.SIGKILL)


def _begin_anew() -> None:
    """Lets vLLM's worker start an update while one is under way, which it refuses by itself. A
    trainer that is killed leaves one, and several workers must not raise (`together`)."""
    start = Worker._start_weight_update

    def begin(worker: Any, is_draft: bool = False) -> None:
        if isinstance(worker.weight_transfer_engine, KvxferWeightTransferEngine):
            worker._weight_update_active = False
        start(worker, is_draft)

    Worker._start_weight_update = begin


_begin_anew()
