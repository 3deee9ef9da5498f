"""Moves prompts by push and pull between a prefill and a decode engine of vLLM whose caches are in
GPU memory: `python -m tests.vllm.gpu_pair MODEL RUNNER LAYERS`, in vLLM's environment, on a CUDA
driver or the double of one.

Schedulers, connectors, specs, views, and the classes by which both of vLLM's model runners drive
the connectors (`RUNNER`: v1 or v2) are vLLM's own. Only the forward is this program's: it copies,
on a stream, bytes that stand for K and V of a token, and computes the next token from the bytes in
the cache. So a byte that is missing or of another prompt gives another token.

LAYERS are `equal`; `whole`: the same, with all layers of a block as one write; `several`: sparse
MLA with an indexer that has another cache, and a draft model with heads, which vLLM puts into one
group; `large`: layers with a sliding window, whose blocks have twice as many tokens as those of the
others; `states` and `aligned`: recurrent layers beside attention, whose state depends on the state
before, with one block for each request or one at the end of each block.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from cuda.bindings import driver
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import kvxfer.connectors.vllm.connector as connector_module
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.vllm.connector import KvxferConnector
from kvxfer.connectors.vllm.groups import layer_specs
from kvxfer.ticket import Ticket, sign_ticket
from tests.cuda import device_memory
from tests.cuda.bindings import context, good
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import CLUSTER_KEY
from verify.processes.programs import free_port

BLOCKS, TOKENS, LONGEST = 64, 16, 512
WINDOW: Final = 40
GRANULE: Final = 2 << 20  # cuMemCreate's
PROMPTS: Final = 24
ANSWER: Final = 5  # tokens
_NON_BLOCKING: Final = 1

_current: list[int] = [0]  # the stream of the engine that steps


def specs_of(layers: str) -> dict[str, KVCacheSpec]:
    """Returns the spec of each layer, in the order of the forward."""

    def heads(count: int, head_size: int) -> KVCacheSpec:
        shape = {"num_kv_heads": count, "head_size": head_size, "dtype": torch.float32}
        return FullAttentionSpec(block_size=TOKENS, **shape)

    def latent(head_size: int, dtype: torch.dtype) -> KVCacheSpec:
        return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=head_size, dtype=dtype)

    if layers in ("states", "aligned"):
        return {
            f"model.layers.{index}.{'attn' if index % 2 else 'mixer'}": heads(2, 32)
            if index % 2
            else MambaSpec(
                block_size=TOKENS if layers == "aligned" else LONGEST,
                shapes=((3, 96), (4, 16, 8)),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=heads(2, 32).page_size_bytes,
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
                mamba_cache_mode="align" if layers == "aligned" else "none",
            )
            for index in range(6)
        }
    if layers == "large":
        window = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
        return {
            f"model.layers.{index}.self_attn.attn": heads(2, 32)
            if index % 3 == 2
            else SlidingWindowSpec(block_size=TOKENS, sliding_window=WINDOW, **window)
            for index in range(6)
        }
    if layers in ("equal", "whole"):
        return {f"model.layers.{index}.self_attn.attn": heads(2, 32) for index in range(4)}
    made = {}
    for index in range(2):
        made[f"model.layers.{index}.self_attn.indexer.k_cache"] = latent(132, torch.uint8)
        made[f"model.layers.{index}.self_attn.attn"] = latent(96, torch.float32)
    return made | {"model.layers.2.self_attn.attn": heads(2, 32)}


def token_bytes(spec: KVCacheSpec) -> int:
    return spec.num_heads * spec.state_content_size_bytes


def content_of(layer: int, tokens: Sequence[int], nbytes: int) -> bytes:
    """Returns a layer's bytes of the last token, all heads; they depend on all of the tokens."""
    seed = hashlib.blake2b(str((layer, tuple(tokens))).encode(), digest_size=8).digest()
    return random.Random(seed).randbytes(nbytes)


def next_state(before: bytes, token: int, nbytes: int) -> bytes:
    seed = hashlib.blake2b(before + str(token).encode(), digest_size=8).digest()
    return random.Random(seed).randbytes(nbytes)


def attended(spec: KVCacheSpec, known: int) -> range:
    """Returns the tokens that the last of `known` tokens attends to, or whose state the layer
    has."""
    if isinstance(spec, MambaSpec):
        return range(known - 1, known)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else known
    return range(max(known - window, 0), known)


def next_token(contents: Iterator[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        digest.update(content)
    return 2 + int.from_bytes(digest.digest()) % 500


def answer_to(prompt: Sequence[int], count: int, specs: Mapping[str, KVCacheSpec]) -> list[int]:
    """Returns the answer of a server with these layers that computes everything itself."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(_contents_of(tokens, list(specs.values()))))
    return tokens[len(prompt) :]


def _contents_of(tokens: Sequence[int], specs: Sequence[KVCacheSpec]) -> Iterator[bytes]:
    for layer, spec in enumerate(specs):
        if isinstance(spec, MambaSpec):
            state = b""
            for token in tokens:
                state = next_state(state, token, token_bytes(spec))
            yield state
        else:
            for token in attended(spec, len(tokens)):
                yield content_of(layer, tokens[: token + 1], token_bytes(spec))


def config_of(model: str, name: str, role: str, layers: str) -> VllmConfig:
    extra = {"instance_id": name, "http_address": "http://127.0.0.1:9", "peer_timeout": PATIENCE}
    extra["whole_blocks"] = layers == "whole"
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_batched_tokens=64,  # so that prompts come in chunks
        max_num_seqs=8,
        block_size=TOKENS,
        enable_prefix_caching=layers == "aligned",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvxferConnector",
            kv_connector_module_path="kvxfer.connectors.vllm.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    ).create_engine_config()


class Engine:
    """A scheduler, the connector of a worker, and the worker's forward."""

    def __init__(self, config: VllmConfig, runner: str, specs: dict[str, KVCacheSpec]) -> None:
        self.config, self.runner = config, runner
        self.names = list(specs)
        self.sizes = [token_bytes(spec) for spec in specs.values()]
        caches = self._allocate(specs)
        self.stream = int(good(driver.cuStreamCreate(_NON_BLOCKING)))
        scheduled, hashed = resolve_kv_cache_block_sizes(caches, config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hashed, sha256)
        self.scheduler = Scheduler(
            config,
            generate_scheduler_kv_cache_config([caches]),
            StructuredOutputManager(config),
            block_size=scheduled,
            hash_block_size=hashed,
        )
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        assert isinstance(worker, KvxferConnector)
        self.worker = worker
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        kv_caches = self.views
        if runner == "v2":
            self.active = ActiveKVConnector(config, kv_caches)  # registers them, too
        else:
            worker.register_kv_caches(kv_caches)
        assert worker._agent is not None and worker._agent.gpu == 0
        self.agent = worker._agent
        planes = self.agent.endpoint.layout.num_layers
        assert planes == (
            1 if config.kv_transfer_config.kv_connector_extra_config["whole_blocks"] else len(specs)
        )
        assert self.scheduler.connector is not None
        self.scheduler.connector.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        self.replies: list[tuple[str, dict[str, Any]]] = []  # for prompts that are kept
        self.pinned = int(good(driver.cuMemHostAlloc(64 * sum(self.sizes), 0)))
        self.rng = random.Random(1)

    def _allocate(self, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
        """Allocates GPU memory and divides it as vLLM does."""
        cache_config = self.config.cache_config
        cache_config.num_gpu_blocks = cache_config.num_gpu_blocks_override = BLOCKS
        wanted = KvxferConnector.get_required_kvcache_layout(self.config)
        layout = KVCacheLayout[wanted or "LBHNC"]
        cache_config.kv_cache_layout = layout.name
        groups = get_kv_cache_groups(self.config, specs)
        self.group_of = {
            name: index for index, group in enumerate(groups) for name in group.layer_names
        }
        caches = get_kv_cache_config_from_groups(self.config, groups, 1 << 30)
        assert caches.num_blocks == BLOCKS
        kept = layer_specs(caches)  # with the block sizes that vLLM has chosen
        self.specs = {name: kept[name] for name in specs}
        nbytes = caches.kv_cache_tensors[0].size
        self.nbytes = -(-nbytes // GRANULE) * GRANULE
        self.address = device_memory.create(self.nbytes)
        on_gpu = (ctypes.c_int8 * nbytes).from_address(self.address)
        raw = torch.frombuffer(on_gpu, dtype=torch.int8)
        self.views: dict[str, torch.Tensor] = {}
        for placed in caches.kv_cache_tensors:
            of_layers = create_kv_cache_views(
                raw, self.specs[placed.layers[0]], BLOCKS, layout, placed
            )
            self.views |= zip(placed.layers, of_layers, strict=True)
        return caches

    def add(self, prompt: list[int], transfer: dict[str, Any], max_tokens: int) -> Request:
        extra = {"kv_transfer_params": transfer}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(uuid.uuid4().hex, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedules, runs and updates, as vLLM's engine core does."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        _current[0] = self.stream
        if not self.scheduler.has_requests():
            return
        planned = self.scheduler.schedule()
        graph = self.rng.random() < 0.3
        with set_current_vllm_config(self.config):
            run = self._run_v2 if self.runner == "v2" else self._run_v1
            told = run(planned, graph)
        outputs = self.scheduler.update_from_output(planned, self._sample(planned, told))
        for one in (one for of_client in outputs.values() for one in of_client.outputs):
            if one.kv_transfer_params:
                self.replies.append((one.request_id, one.kv_transfer_params))

    def _run_v1(self, planned: SchedulerOutput, graph: bool) -> KVConnectorOutput | None:
        mixin = KVConnectorModelRunnerMixin
        if not planned.total_num_scheduled_tokens:
            empty = mixin.kv_connector_no_forward(planned, self.config)
            return empty.kv_connector_output
        with (
            set_forward_context(None, self.config),
            mixin.maybe_get_kv_connector_output(planned) as told,
        ):
            self._forward(planned, graph)
        return told

    def _run_v2(self, planned: SchedulerOutput, graph: bool) -> KVConnectorOutput | None:
        if not planned.total_num_scheduled_tokens:
            return self.active.no_forward(planned).kv_connector_output
        self.active.pre_forward(planned)
        self._forward(planned, graph)
        self.active.finish_forward()
        return self.active.post_forward(planned.finished_req_ids)

    def _forward(self, planned: SchedulerOutput, graph: bool) -> None:
        """Computes layer by layer, without waiting; in a graph it does not call the hooks."""
        good(driver.cuStreamSynchronize(self.stream))  # the pinned memory is reused
        at = self.pinned
        for layer, name in enumerate(self.names):
            for request_id, count in planned.num_scheduled_tokens.items():
                for token, content in self._computed(request_id, layer, count):
                    ctypes.memmove(at, content, len(content))
                    for target, size in self._places(request_id, layer, token):
                        good(driver.cuMemcpyHtoDAsync(target, at, size, self.stream))
                        at += size
            if not graph and name.endswith("attn"):
                self.worker.save_kv_layer(name, torch.empty(0), None)

    def _computed(self, request_id: str, layer: int, count: int) -> Iterator[tuple[int, bytes]]:
        """Yields the layer's bytes of each token of this step, or a recurrent layer's state after
        the last one."""
        request = self.scheduler.requests[request_id]
        # The scheduler has counted them as computed already.
        end = request.num_computed_tokens
        tokens = list(request.all_token_ids)
        if not isinstance(self.specs[self.names[layer]], MambaSpec):
            for token in range(end - count, end):
                yield token, content_of(layer, tokens[: token + 1], self.sizes[layer])
            return
        state = self._kept(request_id, layer, end - count - 1) if end > count else b""
        for token in tokens[end - count : end]:
            state = next_state(state, token, self.sizes[layer])
        yield end - 1, state

    def _kept(self, request_id: str, layer: int, token: int) -> bytes:
        places = self._places(request_id, layer, token)
        return b"".join(device_memory.read(at, size) for at, size in places)

    def _places(self, request_id: str, layer: int, token: int) -> Iterator[tuple[int, int]]:
        """Yields the address and size of the layer's bytes of the token, head by head."""
        name = self.names[layer]
        spec, view = self.specs[name], self.views[name]
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[self.group_of[name]]
        block, row = divmod(token, spec.block_size)
        if isinstance(spec, MambaSpec):
            single = spec.mamba_cache_mode == "none"
            block, row = 0 if single else block, 0
        assert blocks[block], "vLLM's null block"
        for of_head in view[blocks[block], :, row]:
            yield of_head.data_ptr(), of_head.nbytes

    def _sample(
        self, planned: SchedulerOutput, told: KVConnectorOutput | None
    ) -> ModelRunnerOutput:
        good(driver.cuStreamSynchronize(self.stream))
        ids = list(planned.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            known = request.num_computed_tokens
            whole = known >= request.num_tokens
            sampled.append([next_token(self._contents(request_id, known))] if whole else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _contents(self, request_id: str, known: int) -> Iterator[bytes]:
        for layer, spec in enumerate(self.specs.values()):
            for token in attended(spec, known):
                yield self._kept(request_id, layer, token)


def ticket_for(prefill: Engine, decode: Engine) -> dict[str, Any]:
    expires = SYSTEM_CLOCK.unix() + 20 * PATIENCE
    epochs = [engine.agent.endpoint.epoch for engine in (prefill, decode)]
    ticket = Ticket(uuid.uuid4().hex, "r", "prefill", epochs[0], "decode", epochs[1], expires)
    return {
        "ticket": sign_ticket(ticket, CLUSTER_KEY),
        "prefill_engine_address": prefill.agent.engine_address,
    }


@contextlib.contextmanager
def as_on_a_gpu(config: VllmConfig) -> Iterator[None]:
    """Makes vLLM's CPU build treat this process as a worker with a GPU."""
    with set_current_vllm_config(config):
        url = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, url, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    connector_module.current_platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    torch.cuda.current_stream = lambda device=None: _current[0]
    yield


def main(model: str, runner: str, layers: str) -> None:
    specs = specs_of(layers)
    rng = random.Random(7)
    configs = [
        config_of(model, name, role, layers)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    with as_on_a_gpu(configs[0]):
        prefill, decode = (Engine(config, runner, specs) for config in configs)
        asked, kept = [], {}
        for number in range(PROMPTS):
            prompt = [rng.randrange(2, 500) for _ in range(rng.randrange(2, 150))]
            if number % 2:
                request = prefill.add(prompt, {"do_remote_decode": True}, 1)
                kept[request.request_id] = prompt
            else:
                ticket = ticket_for(prefill, decode)
                prefill.add(prompt, ticket, 1)
                asked.append((prompt, decode.add(prompt, ticket, ANSWER)))

        def done() -> bool:
            prefill.step()
            while prefill.replies:  # decode asks for what is kept
                request_id, reply = prefill.replies.pop()
                prompt = kept.pop(request_id)
                asked.append((prompt, decode.add(prompt, reply, ANSWER)))
            decode.step()
            busy = prefill.scheduler.has_requests() or decode.scheduler.has_requests()
            return not kept and not busy

        wait_until(done, 8 * PATIENCE, pause=0.001)
        assert len(asked) == PROMPTS
        for prompt, request in asked:
            assert list(request.output_token_ids) == answer_to(prompt, ANSWER, specs)
        sent = prefill.agent.endpoint.traffic()
        for engine in (prefill, decode):
            manager = engine.scheduler.kv_cache_manager
            assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1  # all but the null block
            engine.worker.shutdown()
    print(f"{PROMPTS} prompts by push and pull, {ANSWER} tokens each, as of one server; {sent}")


if __name__ == "__main__":
    context()
    main(*sys.argv[1:])
