"""KvxferConnector, which vLLM loads. It only translates between vLLM and the other modules here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.checkpoints import adapter_of
from kvxfer.connectors.transfer_engine import pci_address
from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.caches import (
    LayerCache,
    form_name,
    heads_in_all,
    in_model_order,
    layout_of,
    packing_name,
    register_caches,
    require_movable,
)
from kvxfer.connectors.vllm.groups import HeldWindows, groups_of, layer_specs
from kvxfer.connectors.vllm.identity import digest_of, identity_of
from kvxfer.connectors.vllm.idle_steps import IdleSteps
from kvxfer.connectors.vllm.kv_events import EventPrefixes
from kvxfer.connectors.vllm.load import RequestCounter
from kvxfer.connectors.vllm.plan import StepPlan, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import PromptBlocks
from kvxfer.connectors.vllm.pull import KeptPrompts, Source, is_pull
from kvxfer.connectors.vllm.ranks import (
    from_first_rank,
    gather_addresses,
    require_own_api,
    require_tensor_parallel,
    this_rank,
)
from kvxfer.connectors.vllm.scheduler import Scheduled, TransferScheduler
from kvxfer.connectors.vllm.settings import WHOLE_BLOCKS, ConnectorSettings
from kvxfer.connectors.vllm.shared_cache import SharedCache
from kvxfer.connectors.vllm.sleep import sleepers
from kvxfer.connectors.vllm.states import state_shape
from kvxfer.connectors.vllm.stats import TransferMetrics, TransferStats
from kvxfer.connectors.vllm.whole_blocks import as_whole_blocks
from kvxfer.connectors.vllm.worker import LOOP_SECONDS, TransferWorker
from kvxfer.errors import InvalidArgument, KvxferError
from kvxfer.instances import Role
from kvxfer.prefix_hashes import prompt_hashes
from kvxfer.ticket import verify_ticket

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvxfer")

PREFIXES_LABEL: Final = "prefixes"
"""The label for how an instance knows the content of its prefix cache: `kv-events`, or `guessed`
from the prompts that it has computed."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A StepPlan on its way to the workers."""

    plan: StepPlan


@dataclass
class EndpointMetadata(KVConnectorHandshakeMetadata):
    """The endpoint of a worker, sent to the scheduler side once the instance is registered."""

    epoch: int
    engine_address: str


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """The KV transfer of a vLLM instance.

    vLLM makes two: one in the process of the scheduler, one in that of the worker.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # noqa: S101 (the base has refused that)
        require_tensor_parallel(vllm_config.parallel_config)
        require_own_api(vllm_config.parallel_config)
        served = vllm_config.model_config.served_model_name
        self._settings = ConnectorSettings.read(
            transfer.kv_connector_extra_config,
            role=str(transfer.kv_role),
            engine_id=str(transfer.engine_id),
            model=served if isinstance(served, str) else served[0],
        )
        self._block_size = vllm_config.cache_config.block_size
        self._block_groups = groups_of(kv_cache_config, self._block_size)
        if vllm_config.cache_config.use_replayssm:
            raise InvalidArgument(
                "with ReplaySSM a state lags behind its tokens, and kvxfer does not move the "
                "missing ones; start the server without use_replayssm"
            )
        if vllm_config.aux_output_config.enabled:
            raise InvalidArgument(
                "kvxfer does not move the experts that a prompt was routed to, "
                "and vLLM ends if decode lacks them; start the server without "
                "--enable-return-routed-experts"
            )
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        events = vllm_config.kv_events_config
        has_prefixes = vllm_config.cache_config.enable_prefix_caching
        tells_events = has_prefixes and events is not None and events.enable_kv_cache_events
        self._events = EventPrefixes(self._settings.model) if tells_events else None
        self._guesses = has_prefixes and not tells_events
        if has_prefixes:
            of = {PREFIXES_LABEL: "kv-events" if tells_events else "guessed"}
            self._settings = replace(self._settings, labels={**of, **self._settings.labels})
        self._vllm_config = vllm_config
        self._scheduler: TransferScheduler
        self._worker: TransferWorker
        self._agent: Agent | None = None
        self._stats: TransferStats | None = None
        if role is KVConnectorRole.SCHEDULER:
            # Modules of a draft model read ahead of a prompt's end, where tokens are only guesses.
            ahead = vllm_config.num_prefill_lookahead_tokens
            blocks = PromptBlocks(self._block_size, self._block_groups, max(ahead - 1, 1))
            self._blocks = blocks
            self._held = HeldWindows(blocks)
            self._counter = RequestCounter()
            self._idle = IdleSteps(allowed=vllm_config.parallel_config.data_parallel_size == 1)
            self._scheduler = TransferScheduler(blocks, self._side_of, self._settings.lease_seconds)
            self._kept = KeptPrompts(
                self._settings.instance_id,
                blocks,
                self._settings.lease_seconds,
                lambda: self._settings.keys,
            )

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._held.bind(kv_cache_manager)
        pool = kv_cache_manager.block_pool
        self._counter.bind(
            lambda: (pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block))
        )
        if self._events is not None:
            self._follow_events(kv_cache_manager, self._events)

    def _follow_events(self, manager: KVCacheManager, prefixes: EventPrefixes) -> None:
        take = manager.take_events

        def taken() -> list[KVCacheEvent]:
            events: list[KVCacheEvent] = take()
            self._scheduler.cache_changed(prefixes.take(events))
            return events

        manager.take_events = taken

    def has_pending_push_work(self) -> bool:
        """True if an engine without requests must step once more: the last step has not reported
        the blocks that were freed at its end."""
        return not self._counter.told

    def on_new_request(self, request: Request) -> None:
        self._counter.arrived(request.request_id, request.num_prompt_tokens)
        asked = request.kv_transfer_params
        try:
            params = TransferParams.of(asked)
        except InvalidArgument as error:
            # An error here would end the engine.
            logger.warning("request %s is computed here: %s", request.request_id, error)
            return
        tokens = request.prompt_token_ids
        pull = is_pull(asked) and self._settings.role is not Role.DECODE
        if pull and self._blocks.exact and _asks_logprobs_of_the_prompt(request):
            return  # the last token is not computed here
        if tokens is None or (params is None and not pull):
            return
        adapter, digest = "", digest_of(request)
        if (lora := request.lora_request) is not None:
            adapter = adapter_of(lora.lora_name, lora.lora_path)
        if params is None:
            self._kept.arrived(request.request_id, len(tokens), digest, adapter)
        else:
            self._scheduler.arrived(request.request_id, params, len(tokens), digest, adapter)
        if self._blocks.exact and (pull or self._scheduler.sends(request.request_id)):
            _shorten(request, self._blocks.moved(len(tokens)))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.external_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        ids = blocks.get_block_ids()
        self._scheduler.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        tokens = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        scheduled = [
            Scheduled(new.req_id, new.block_ids, new.num_computed_tokens, tokens[new.req_id])
            for new in scheduler_output.scheduled_new_reqs
        ]
        scheduled += [
            Scheduled(request_id, ids or (), computed, tokens[request_id])
            for request_id, ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        preempted = scheduler_output.preempted_req_ids or ()
        plan = self._scheduler.step(scheduled, preempted)
        plan.counted = self._counter.step(scheduled, preempted)
        plan.idle_seconds = self._idle.step(scheduler_output.total_num_scheduled_tokens)
        self._held.release(preempted)
        for one in scheduled:
            of = one.request_id
            prompt = self._scheduler.sent_tokens(of) or self._kept.tokens(of)
            computed = one.computed_tokens + one.step_tokens
            if prompt and computed >= self._blocks.moved(prompt):
                self._held.hold(of, prompt)
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.received(connector_output.finished_recving or ())
        self._held.release(connector_output.finished_sending or ())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._counter.ended(request.request_id)
        self._note_cached(request)
        how = f"its request ended: {request.status.name.lower().replace('_', ' ')}"
        computed = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        request_id = request.request_id
        ids = self._held.block_ids(request_id) or block_ids
        send, reply = self._kept.finished(request_id, ids, computed=computed)
        if send is not None:
            self._scheduler.keep(send)
            return True, reply
        sending = self._scheduler.finished(request_id, how)
        if not sending:
            self._held.release((request_id,))
        return sending, reply

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        endpoints = [rank for rank in ranks if isinstance(rank, EndpointMetadata)]
        addresses = tuple(endpoint.engine_address for endpoint in endpoints)
        self._kept.source = Source(endpoints[0].epoch, addresses)

    def _note_cached(self, request: Request) -> None:
        """Notes the request's whole blocks as cached, if only their tokens identify them."""
        if not self._guesses or request.mm_features or request.cache_salt is not None:
            return
        blocks = request.num_computed_tokens // self._block_size
        tokens = request.all_token_ids[: blocks * self._block_size]
        adapter = request.lora_request
        model = self._settings.model if adapter is None else adapter.lora_name
        self._scheduler.cached(prompt_hashes(tokens, model))

    def _side_of(self, params: TransferParams) -> Role | None:
        """Returns this instance's side of a transfer; None if the ticket is invalid or for others.
        An instance with one role returns its role: the workers check the ticket."""
        if self._settings.role is not Role.BOTH:
            return self._settings.role
        try:
            ticket = verify_ticket(params.ticket, self._settings.keys, now=SYSTEM_CLOCK.unix())
        except KvxferError as error:
            logger.warning("%s", error)
            return None
        this = self._settings.instance_id
        if this in (ticket.prefill_id, ticket.decode_id):
            return Role.PREFILL if this == ticket.prefill_id else Role.DECODE
        return Role.DECODE if ticket.bearer else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns the layout with heads before tokens: the part of a block for one rank of the
        other side then lies together. None for MLA, which has one head. For whole blocks, all
        layers of a block lie side by side."""
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        if transfer is not None and transfer.kv_connector_extra_config.get(WHOLE_BLOCKS):
            return "BLHNC"
        return None if model is None or model.use_mla else "LBHNC"

    # Worker side.

    def get_mem_pool_context(self) -> SharedCache | None:
        return SharedCache(logger) if current_platform.is_cpu() else None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        config, rank = self._vllm_config, this_rank()
        if not (on_cpu := current_platform.is_cpu()):
            require_movable(config, current_platform)
        caches = in_model_order(self._layer_caches(kv_caches, rank.size))
        # Blocks may be absent if a group does not keep all of them.
        has_tables = len(self._groups) > 1 or any(group.partial for group in self._block_groups)
        of_rank = partial(
            layout_of,
            block_size=self._block_size,
            opaque=on_cpu,
            cache_dtype=config.cache_config.cache_dtype,
            tp_size=rank.size,
            tp_rank=rank.rank,
        )
        layout = of_rank(caches, groups=self._groups if has_tables else ())
        if self._settings.whole_blocks:
            caches = as_whole_blocks(caches, layout)
            layout = of_rank(caches)
        device = next(iter(kv_caches.values())).device
        self._agent = Agent(self._settings, pci_address(device.type, device.index))
        settings = self._settings
        identity = from_first_rank(
            lambda: identity_of(config, settings.checkpoint, settings.instance_id)
        )
        make_cache = partial(register_caches, caches=caches, layout=layout)
        address = self._agent.start(make_cache, identity)
        self._agent.join(gather_addresses(address))
        stream = None if self._agent.gpu is None else torch.cuda.current_stream
        self._worker = TransferWorker(self._agent, list(caches), stream)
        sleepers.add(self)

    def suspend(self) -> None:
        """Ends all transfers. None reads or writes the cache when this returns, and none begins
        until resume() (kvxfer.connectors.vllm.sleep)."""
        self._worker.suspend()

    def resume(self) -> None:
        self._worker.resume()

    def _layer_caches(
        self, kv_caches: Mapping[str, torch.Tensor], tp_size: int
    ) -> dict[str, LayerCache]:
        """Returns the cache of each layer that has one. Some layers attend to another's cache."""
        config = self._vllm_config
        attention = config.compilation_config.static_forward_context
        cache_dtype = config.cache_config.cache_dtype
        specs = layer_specs(self._kv_cache_config)
        kept = {}
        for name, tensor in kv_caches.items():
            layer, spec = attention.get(name), specs.get(name)
            if spec is None or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if isinstance(spec, MambaSpec):
                kept[name] = LayerCache(tensor, state=state_shape(spec, tp_size))
                continue
            slots = getattr(spec, "num_head_slots", None) is not None
            if current_platform.is_cpu():
                packing = packing_name(getattr(layer, "isa", None), cache_dtype)
            else:
                packing = layer.attn_backend.get_name() if slots else form_name(cache_dtype)
            kept[name] = LayerCache(
                tensor,
                None if slots else heads_in_all(tensor.shape[1], _totals(config, name), tp_size),
                isinstance(spec, MLAAttentionSpec),
                packing,
                block_size=spec.block_size,
            )
        return kept

    def get_handshake_metadata(self) -> EndpointMetadata:
        assert self._agent is not None  # noqa: S101 (the caches are registered)
        return EndpointMetadata(self._agent.endpoint.epoch, self._agent.engine_address)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)  # noqa: S101 (we made it)
        self._worker.begin_step(connector_metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is computed only after all its blocks have arrived."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self._worker.save_layer(layer_name)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_receives()

    def wait_for_save(self) -> None:
        self._worker.end_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results(finished_req_ids)
        self._stats = TransferStats.of(results.ended) if results.ended else None
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def get_kv_connector_stats(self) -> TransferStats | None:
        stats, self._stats = self._stats, None
        return stats

    def set_weights_version(self, version: int) -> None:
        """Takes the version of weights that were updated in place; see
        kvxfer.connectors.vllm.weights."""
        assert self._agent is not None  # noqa: S101 (only a worker has weights)
        self._agent.run(self._agent.take_weights(version), LOOP_SECONDS)

    def shutdown(self) -> None:
        if self._agent is not None:
            self._agent.close()

    # Metrics, in the process of the API.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _totals(config: VllmConfig, layer: str) -> set[int]:
    """Returns the numbers of KV heads that a layer may have before tensor parallelism: that of the
    model's layer with its number, and that of the draft model, whose layer numbers may start anew.
    """
    draft = config.speculative_config and config.speculative_config.draft_model_config
    totals = {draft.get_total_num_kv_heads()} if draft else set()
    model = config.model_config.model_arch_config
    number = next((int(part) for part in layer.split(".") if part.isdecimal()), 0)
    if number < model.total_num_hidden_layers:
        totals.add(model[number].total_num_kv_heads)
    return totals


def _asks_logprobs_of_the_prompt(request: Request) -> bool:
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None


def _shorten(request: Request, tokens: int) -> None:
    """Limits a prompt to its first `tokens` tokens, and its answer to one token, unless `tokens` is
    0. Decode continues from the state after them, which a further token would overwrite."""
    if not tokens:
        return
    assert request.prompt_token_ids is not None  # noqa: S101 (its digest is made of them)
    request.prompt_token_ids = request.prompt_token_ids[:tokens]
    del request._all_token_ids[tokens:]  # vLLM's own connectors do the same
    request.num_prompt_tokens = tokens
    request.max_tokens = 1
