"""The worker side of the vLLM connector with its cache in GPU memory: `python -m
tests.connectors.gpu_worker CASE ROUNDS`."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from cuda.bindings import driver

from kvxfer.connectors.vllm.caches import LayerCache, layout_of, register_caches
from kvxfer.connectors.vllm.plan import StepPlan
from kvxfer.connectors.vllm.worker import Results, TransferWorker
from kvxfer.instances import Role
from tests.connectors.agents import BLOCKS, LAYERS, agent_of, offered, params, sent
from tests.cuda import device_memory
from tests.cuda.bindings import context, good
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import RunningControlPlane

HEADS, TOKENS, CONTENT = 2, 16, 128
BLOCK_BYTES: Final = HEADS * TOKENS * CONTENT
_NON_BLOCKING: Final = 1


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Returns GPU memory as a tensor on a device that torch cannot name; the bytes are not
    touched."""
    memory = (ctypes.c_int8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int8)


class Side:
    """A worker, its cache, and the stream of its forwards."""

    def __init__(
        self, stack: ExitStack, role: Role, url: str, told_stream: int | None, lease: float
    ) -> None:
        nbytes = len(LAYERS) * BLOCKS * BLOCK_BYTES
        self.address = device_memory.allocate(nbytes)
        stack.callback(device_memory.free, self.address)
        self.stream = good(driver.cuStreamCreate(_NON_BLOCKING))
        whole = tensor_at(self.address, nbytes)
        # [layers, blocks, heads, tokens, content]: vLLM's LBHNC.
        views = whole.view(len(LAYERS), BLOCKS, HEADS, TOKENS, CONTENT)
        caches = {name: LayerCache(view, HEADS) for name, view in zip(LAYERS, views, strict=True)}
        layout = layout_of(caches, TOKENS, opaque=False)
        make_cache = functools.partial(register_caches, caches=caches, layout=layout)
        self.agent = stack.enter_context(agent_of(role, url, make_cache, lease))
        assert self.agent.gpu == 0
        told = int(self.stream) if told_stream is None else told_stream
        self.worker = TransferWorker(self.agent, LAYERS, lambda: told)
        self.told = Results()

    def place(self, layer: int, block: int) -> int:
        return self.address + (layer * BLOCKS + block) * BLOCK_BYTES

    def read(self, layer: int, block: int) -> bytes:
        return device_memory.read(self.place(layer, block), BLOCK_BYTES)

    def step(
        self,
        plan: StepPlan | None = None,
        compute: Callable[[str], None] = lambda _: None,
        *,
        graph: bool = False,
        finished: tuple[str, ...] = (),
    ) -> None:
        """Runs one step of the engine; vLLM does not call save_layer() in a CUDA graph."""
        self.worker.begin_step(plan or StepPlan())
        for layer in LAYERS:
            compute(layer)
            if not graph:
                self.worker.save_layer(layer)
        self.worker.start_receives()
        self.worker.end_forward()
        results = self.worker.results(finished)
        self.told.sent |= results.sent
        self.told.received |= results.received
        self.told.failed |= results.failed

    def steps_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or self.step(), pause=0.0005)


@contextmanager
def sides(
    *, blind: Role | None = None, lease: float = 10 * PATIENCE
) -> Iterator[tuple[Side, Side]]:
    """The two sides. The worker of the role `blind` is told another stream than that of its
    forwards. `lease` is the seconds that either side waits."""
    with ExitStack() as stack:
        url = stack.enter_context(RunningControlPlane()).url
        idle = int(good(driver.cuStreamCreate(_NON_BLOCKING)))
        told = {role: idle if role is blind else None for role in (Role.PREFILL, Role.DECODE)}
        yield (
            Side(stack, Role.PREFILL, url, told[Role.PREFILL], lease),
            Side(stack, Role.DECODE, url, told[Role.DECODE], lease),
        )


class Pinned:
    """Host memory that streams copy from while the processor continues."""

    def __init__(self, nbytes: int) -> None:
        self.address = int(good(driver.cuMemHostAlloc(nbytes, 0)))

    def write(self, offset: int, data: bytes) -> int:
        ctypes.memmove(self.address + offset, data, len(data))
        return self.address + offset


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Makes a stream wait, as for the kernel of another rank."""
    word = ctypes.c_uint64.from_address(int(good(driver.cuMemHostAlloc(8, 0))))
    word.value = 0
    good(driver.cuStreamWaitValue64(stream, ctypes.addressof(word), 1, 0))
    try:
        yield
    finally:
        word.value = 1
        good(driver.cuStreamSynchronize(stream))


def wrong_rounds(
    prefill: Side, decode: Side, rounds: int, rng: random.Random, slow: Side | None = None
) -> int:
    """Returns the number of rounds in which decode got other bytes than prefill's kernels computed.
    `slow` is the side whose stream is held until the transfer has ended."""
    ours, theirs = (3, 9, 1, 10), (8, 2, 5, 7)
    pinned = Pinned(len(LAYERS) * len(ours) * BLOCK_BYTES)
    wrong = 0
    for _ in range(rounds):
        data = {layer: [rng.randbytes(BLOCK_BYTES) for _ in ours] for layer in LAYERS}

        def compute(name: str, data: dict[str, list[bytes]] = data) -> None:
            layer = LAYERS.index(name)
            for index, block in enumerate(ours):
                at = (layer * len(ours) + index) * BLOCK_BYTES
                source = pinned.write(at, data[name][index])
                good(
                    driver.cuMemcpyHtoDAsync(
                        prefill.place(layer, block), source, BLOCK_BYTES, prefill.stream
                    )
                )

        def zero(name: str) -> None:
            layer = LAYERS.index(name)
            for block in theirs:
                good(
                    driver.cuMemsetD8Async(
                        decode.place(layer, block), 0, BLOCK_BYTES, decode.stream
                    )
                )

        of = params(prefill.agent, decode.agent)
        graph, decode_first = rng.random() < 0.3, rng.random() < 0.5
        with held(slow.stream) if slow else nullcontext():
            if decode_first:
                decode.step(offered(of, theirs), zero, graph=True)
            prefill.step(sent(of, ours, 4), compute, graph=graph)
            if not decode_first:
                decode.step(offered(of, theirs), zero, graph=True)
            decode.steps_until(lambda: decode.told.received)
            prefill.step(finished=("p",))
            prefill.steps_until(lambda: prefill.told.sent)
        assert not decode.told.failed
        good(driver.cuStreamSynchronize(decode.stream))
        good(driver.cuStreamSynchronize(prefill.stream))
        got = {
            name: [decode.read(layer, block) for block in theirs]
            for layer, name in enumerate(LAYERS)
        }
        wrong += got != data
        prefill.told, decode.told = Results(), Results()
    return wrong


def in_order(rounds: int) -> None:
    """Blocks leave once the stream has computed them, and arrive after decode's earlier kernels."""
    with sides() as (prefill, decode):
        assert wrong_rounds(prefill, decode, rounds, random.Random(1)) == 0


def blind(_rounds: int) -> None:
    """A worker that does not follow the forward's stream gets wrong bytes in every round."""
    for role in (Role.PREFILL, Role.DECODE):
        with sides(blind=role) as (prefill, decode):
            slow = prefill if role is Role.PREFILL else decode
            assert wrong_rounds(prefill, decode, 3, random.Random(1), slow) == 3, role


def stuck(_rounds: int) -> None:
    """If decode's stream does not reach the blocks, the request fails with the lease."""
    with sides(lease=1.0) as (prefill, decode), held(decode.stream):
        of = params(prefill.agent, decode.agent)
        decode.step(offered(of, (8, 2)), graph=True)
        prefill.step(sent(of, (3, 9), 2, total=2))
        decode.steps_until(lambda: decode.told.failed)
        prefill.step(finished=("p",))
        prefill.steps_until(lambda: prefill.told.sent)


def aborted(_rounds: int) -> None:
    """If a request ends while its blocks wait for the stream, prefill learns of it at once."""
    with sides() as (prefill, decode), held(decode.stream):
        of = params(prefill.agent, decode.agent)
        decode.step(offered(of, (8, 2)), graph=True)
        prefill.step(sent(of, (3, 9), 2, total=2))
        decode.step(StepPlan(cancels={"d": "its request has ended"}))
        decode.steps_until(lambda: decode.told.received)
        assert not decode.told.failed
        prefill.step(finished=("p",))
        prefill.steps_until(lambda: prefill.told.sent)


def collected(_rounds: int) -> None:
    """Engines, and the words that streams counted up, are collected while a stream waits for this
    interpreter."""
    gc.disable()
    with sides() as (prefill, decode):
        assert wrong_rounds(prefill, decode, 1, random.Random(1)) == 0
    del prefill, decode
    stream = good(driver.cuStreamCreate(_NON_BLOCKING))
    with held(stream):
        gc.collect()
        # A CUDA call does not wait either.
        good(driver.cuStreamQuery(good(driver.cuStreamCreate(_NON_BLOCKING))))


CASES: Final[dict[str, Any]] = {
    case.__name__: case for case in (in_order, blind, stuck, aborted, collected)
}

if __name__ == "__main__":
    name, count = sys.argv[1:]
    context()
    CASES[name](int(count))
