"""The classes that SGLang loads. They only translate between SGLang and the other modules here."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

from kvxfer.addresses import host_and_port
from kvxfer.clock import SYSTEM_CLOCK, unix_ns
from kvxfer.connectors.checkpoints import checkpoint_digest, rope_of
from kvxfer.connectors.sglang.agent import Agent
from kvxfer.connectors.sglang.bootstrap import BootstrapServer, Introductions, register
from kvxfer.connectors.sglang.components import components_of, describe
from kvxfer.connectors.sglang.incoming import Incoming
from kvxfer.connectors.sglang.introduction import Introduction
from kvxfer.connectors.sglang.outgoing import Outgoing
from kvxfer.connectors.sglang.pools import Metadata, layout_of, register_pool
from kvxfer.connectors.sglang.prompts import hand_prompts_over
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.connectors.sglang.tables import Tables
from kvxfer.connectors.transfer_engine import pci_address
from kvxfer.errors import InvalidArgument, KvxferError
from kvxfer.instances import InstanceSpec, Role
from kvxfer.model_identity import ModelIdentity
from kvxfer.prompt_digest import prompt_digest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.server_args import ServerArgs

    from kvxfer.engine import Engine
    from kvxfer.kv.cache import KvCache

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.25
_CONNECTOR = "sglang/1"


class KVManager(BaseKVManager):
    """The transfer engine of one scheduler process."""

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        _refuse_what_is_not_done(server_args)
        self.kv_args = args
        self.settings = BackendSettings.read()
        self.metadata = Metadata(args.aux_data_ptrs, args.aux_item_lens)
        self.introductions = Introductions(self.settings)
        self.prefill_info_table = self.introductions.known
        components = components_of(args, mla=bool(is_mla_backend))
        self.tables = Tables(components)
        self._kind = (
            str(server_args.served_model_name or server_args.model_path),
            f"{args.kv_cache_dtype_str} of {server_args.dtype}",
            args.page_size,
            self.metadata.nbytes,
            describe(components),
        )
        layout = layout_of(components, args.page_size)
        name = f"sglang-{disaggregation_mode.value}-{socket.gethostname()}-{get_serving().port}"
        model = _identity_of(server_args, self.settings.checkpoint)
        is_prefill = disaggregation_mode is DisaggregationMode.PREFILL
        self.agent = Agent(
            self.settings,
            name,
            unix_ns(SYSTEM_CLOCK),
            lambda engine: register_pool(engine, components, layout),
            model,
            lambda engine, cache: self._spec(name, engine, cache, model, is_prefill=is_prefill),
            gpu=pci_address(server_args.device, args.gpu_id),
        )
        self.agent.begin()
        hand_prompts_over(disaggregation_mode)
        if is_prefill:
            self.register_to_bootstrap()
        logger.info("kvxfer: %s at %s", name, self.agent.engine_address)

    def _spec(
        self, name: str, engine: Engine, cache: KvCache, model: ModelIdentity, *, is_prefill: bool
    ) -> InstanceSpec:
        host, bootstrap_port = self.settings.host, get_disagg().disaggregation_bootstrap_port
        return InstanceSpec(
            instance_id=name,
            role=Role.PREFILL if is_prefill else Role.DECODE,
            model=self._kind[0],
            engine_address=engine.address,
            http_address=f"http://{host_and_port(host, get_serving().port)}",
            layout=cache.layout,
            num_blocks=self.tables.num_pages,
            fabrics=engine.fabrics,
            bootstrap_address=host_and_port(host, bootstrap_port) if is_prefill else "",
            labels={"host": socket.gethostname()},
            identity=model,
        )

    def register_to_bootstrap(self) -> None:
        host = get_serving().host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        about = Introduction(
            self.agent.instance_id, self.agent.epoch, self.agent.engine_address, *self._kind
        )
        server = host_and_port(host, get_disagg().disaggregation_bootstrap_port)
        register(f"http://{server}", about, self.settings)

    def check(self, about: Introduction) -> None:
        """Raises InvalidArgument if the prefill instance does not match this decode instance."""
        about.require_like(*self._kind)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """True if the prefill instance at the address is known. If not, asks there, with a short
        timeout. A receiver for an address that does not answer fails by itself."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            self.agent.run(self.introductions.ask(bootstrap_addr), _ASK_SECONDS)
        except (KvxferError, TimeoutError):
            return False
        return True

    def submit_prefill_recompute(self, receiver: KVReceiver, payload: dict[str, Any]) -> None:
        receiver.refuse("prefill cannot recompute a request that decode has retracted")


class KVSender(BaseKVSender):
    """The prefill side of a request. SGLang's scheduler calls it from one thread."""

    def __init__(
        self,
        mgr: KVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._outgoing = Outgoing(mgr.agent, mgr.metadata, mgr.tables)
        self._row = 0
        self._began = mgr.agent.clock.monotonic()
        self._early_send_wait_event: Any = None

    def take_prompt(self, tokens: Sequence[int], adapter: str) -> None:
        """Takes the prompt and LoRA of the request; see `prompts.py`."""
        try:
            room = _room(self.bootstrap_room, tokens, adapter)
        except InvalidArgument as error:
            self._outgoing.fail(error)
        else:
            self._outgoing.begin(room, -(-len(tokens) // self.kv_mgr.kv_args.page_size))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index or 0
        self._began = self.kv_mgr.agent.clock.monotonic()

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        if self._early_send_wait_event is not None:
            self._early_send_wait_event.synchronize()
            self._early_send_wait_event = None
        self._outgoing.send(kv_indices.tolist(), self._row, state_indices)

    def poll(self) -> int:
        return int(self._outgoing.progress)

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(
            transfer_latency_s=self.kv_mgr.agent.clock.monotonic() - self._began,
            transfer_total_bytes=self._outgoing.nbytes,
        )

    def failure_exception(self) -> None:
        raise self._outgoing.error or KvxferError("the request failed on another rank of prefill")

    def abort(self) -> None:
        self._outgoing.abort("the request was aborted on prefill")


class KVReceiver(BaseKVReceiver):
    """The decode side of a request. SGLang's scheduler calls it from one thread."""

    abort_notified = False

    def __init__(
        self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._room: Room | None = None
        self._incoming = Incoming(
            mgr.agent, mgr.introductions, mgr.metadata, mgr.tables, bootstrap_addr, mgr.check
        )

    @property
    def conclude_state(self) -> int | None:
        poll = self.poll()
        return poll if poll in (0, 4) else None

    def take_prompt(self, tokens: Sequence[int], adapter: str) -> None:
        """Takes the prompt and LoRA of the request; see `prompts.py`."""
        try:
            self._room = _room(self.bootstrap_room, tokens, adapter)
        except InvalidArgument as error:
            self._incoming.fail(error)

    def refuse(self, why: str) -> None:
        self._incoming.fail(InvalidArgument(f"{why}: kvxfer does not support this"))

    def init(self, prefill_dp_rank: int) -> None:
        self._incoming.introduced()

    def send_metadata(
        self,
        kv_indices: NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
    ) -> None:
        if decode_prefix_len or destination is not KVTransferDestination.DEVICE:
            self.refuse("SGLang asks for a part of a prompt, or a destination other than its pages")
        elif self._room is None:
            self.refuse("SGLang has not passed the prompt of the request")
        else:
            self._incoming.receive(self._room, kv_indices.tolist(), aux_index or 0, state_indices)

    def poll(self) -> int:
        return int(self._incoming.progress)

    def failure_exception(self) -> None:
        raise self._incoming.error or KvxferError("the request failed on another rank of decode")

    def abort(self) -> None:
        self._incoming.abort("the request was aborted on decode")


class KVBootstrapServer(BaseKVBootstrapServer):
    """A server beside SGLang's HTTP server, in the same process."""

    def __init__(self, host: str, port: int) -> None:
        self._server = BootstrapServer(host, port, BackendSettings.read())


def _identity_of(server: ServerArgs, checkpoint: str | None) -> ModelIdentity:
    """Returns the model's identity. `checkpoint` is the operator's name for the weights; None takes
    their digest."""
    if checkpoint is None:
        checkpoint = checkpoint_digest(server.model_path, server.revision, "KVXFER_CHECKPOINT")
    model = ModelConfig.from_server_args(server)
    window = model.sliding_window_size
    return ModelIdentity(
        checkpoint=checkpoint,
        model_dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        rope=rope_of(model.hf_text_config),
        sliding_window="" if window is None else str(window),
        connector=_CONNECTOR,
    )


def _room(number: int | None, tokens: Sequence[int], adapter: str) -> Room:
    if number is None or number < 0:
        raise InvalidArgument(
            f"bootstrap_room is {number}; send requests through SGLang's router, which chooses one"
        )
    extras = (adapter,) if adapter else ()
    return Room(number, prompt_digest(tokens, *extras))


def _refuse_what_is_not_done(server_args: ServerArgs) -> None:
    """Raises InvalidArgument for an SGLang option that kvxfer does not support, and names it."""
    parallel = get_parallel()
    for option, size in (
        ("--tp-size", parallel.tp_size),
        ("--pp-size", parallel.pp_size),
        ("--dp-size", parallel.dp_size),
    ):
        if size != 1:
            raise InvalidArgument(
                f"kvxfer supports SGLang instances of one rank, {option} is {size}; start more "
                "instances instead"
            )
    if server_args.device not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"--device is {server_args.device}; kvxfer moves KV caches of SGLang in host memory "
            "and on CUDA GPUs: use cpu or cuda, or another --disaggregation-transfer-backend"
        )
    # With the last two, a page has one number in the KV cache and another in the state beside it.
    for option, is_set in (
        (
            "--disaggregation-decode-enable-radix-cache",
            get_disagg().disaggregation_decode_enable_radix_cache,
        ),
        ("--enable-hisparse", server_args.enable_hisparse),
        ("--enable-unified-memory", server_args.enable_unified_memory),
    ):
        if is_set:
            raise InvalidArgument(f"kvxfer does not support {option}; leave it out")
