"""Engines of vLLM that sleep and wake under load: `python -m tests.vllm.gpu_sleep MODEL RUNNER`, in
vLLM's environment, on a CUDA driver or the double of one.

Like tests.vllm.gpu_pair, but the memory of one cache after the other is freed and allocated again,
by the calls of vLLM's engine core and worker. An access to freed memory would end this program.
Every request that vLLM does not abort gives the tokens of one server.
"""

from __future__ import annotations

import random
import sys
from typing import Any, Final

import vllm.device_allocator
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
from vllm.v1.request import Request, RequestStatus

from kvxfer.connectors.vllm.sleep import sleepers
from tests.cuda import device_memory
from tests.cuda.bindings import context
from tests.vllm.gpu_pair import (
    ANSWER,
    BLOCKS,
    Engine,
    answer_to,
    as_on_a_gpu,
    config_of,
    specs_of,
    ticket_for,
)
from verify.polling import PATIENCE, wait_until

SLEEPS: Final = 12


class Allocator:
    """A stand-in for vLLM's allocator, which needs a GPU: it has the memory of one engine's
    cache."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        assert "kv_cache" not in offload_tags
        device_memory.take_away(self._engine.address, self._engine.nbytes)

    def wake_up(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            device_memory.bring(self._engine.address, self._engine.nbytes)


class Load:
    """Prompts by push and pull, and their expected answers."""

    def __init__(self, prefill: Engine, decode: Engine, rng: random.Random) -> None:
        self.prefill, self.decode, self.rng = prefill, decode, rng
        self.asked: list[tuple[list[int], Request]] = []
        self._kept: dict[str, list[int]] = {}

    def add(self) -> None:
        prompt = [self.rng.randrange(2, 500) for _ in range(self.rng.randrange(2, 150))]
        if self.rng.random() < 0.5:
            request = self.prefill.add(prompt, {"do_remote_decode": True}, 1)
            self._kept[request.request_id] = prompt
        else:
            ticket = ticket_for(self.prefill, self.decode)
            self.prefill.add(prompt, ticket, 1)
            self.asked.append((prompt, self.decode.add(prompt, ticket, ANSWER)))

    def step(self, *engines: Engine) -> None:
        for engine in engines:
            engine.step()
        while self.prefill.replies:
            request_id, reply = self.prefill.replies.pop()
            prompt = self._kept.pop(request_id, None)
            if prompt is not None:
                self.asked.append((prompt, self.decode.add(prompt, reply, ANSWER)))

    def idle(self) -> bool:
        self.step(self.prefill, self.decode)
        return not (self.prefill.scheduler.has_requests() or self.decode.scheduler.has_requests())


def sleep(engine: Engine) -> Any:
    """Suspends an engine, as EngineCore.sleep() with the pause mode "abort" and Worker.sleep() do.
    Returns the backend that wakes it."""
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.reset_prefix_cache()
    vllm.device_allocator.get_mem_allocator_instance = lambda: Allocator(engine)
    sleepers.clear()  # each worker has its own process
    sleepers.add(engine.worker)
    backend = SleepModeBackendFactory.create_backend(engine.config.model_config)
    backend.suspend(1)
    return backend


def main(model: str, runner: str) -> None:
    rng = random.Random(7)
    specs = specs_of("equal")
    configs = [
        config_of(model, name, role, "equal")
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    for config in configs:  # the platform of this build refuses both
        config.model_config.enable_sleep_mode = True
        config.model_config.sleep_mode_backend = "kvxfer"
    with as_on_a_gpu(configs[0]):
        prefill, decode = (Engine(config, runner, specs) for config in configs)
        load = Load(prefill, decode, rng)
        for number in range(SLEEPS):
            one, other = (prefill, decode) if number % 2 else (decode, prefill)
            for _ in range(6):
                load.add()
            for _ in range(rng.randrange(12)):
                load.step(prefill, decode)
            backend = sleep(one)
            for _ in range(rng.randrange(8)):
                load.step(other)
            tags = [["weights"], ["kv_cache"]] if number % 3 else [None]
            for some in tags:
                backend.resume(some)
        for _ in range(6):
            load.add()
        wait_until(load.idle, 8 * PATIENCE, pause=0.001)
        answered = 0
        for prompt, request in load.asked:
            if request.status is not RequestStatus.FINISHED_ABORTED:
                assert list(request.output_token_ids) == answer_to(prompt, ANSWER, specs)
                answered += 1
        assert answered > SLEEPS
        ended = {way: count for way, count in decode.agent.endpoint.counts.ended.items() if count}
        assert ended["receive", "delivered"] > SLEEPS // 2, ended
        for engine in (prefill, decode):
            manager = engine.scheduler.kv_cache_manager
            assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1  # all but the null block
            engine.worker.shutdown()
    aborted = len(load.asked) - answered
    print(f"{SLEEPS} sleeps: {answered} answers as of one server, {aborted} aborted; {ended}")


if __name__ == "__main__":
    context()
    main(*sys.argv[1:])
