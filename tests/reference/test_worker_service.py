"""Both sides of a request: the tokens of a single process, and no block left in use."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading

import pytest

from kvxfer.engine import WatchFor
from kvxfer.errors import (
    BlockPoolExhausted,
    InvalidArgument,
    KvxferError,
    PromptTooLong,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.instances import Role
from kvxfer.kv.block_pool import BlockState
from kvxfer.reference.worker.completions import (
    CompletionRequest,
    DecodeCompletion,
    PrefillCompletion,
)
from kvxfer.reference.worker.stream_order import StreamOrder
from verify.polling import eventually

from .tiny import TINY
from .workers import BLOCKS, WorkerPair, single_process, start_worker

pytestmark = pytest.mark.native

PROMPT = "the cache of this prompt moves"


async def complete(
    workers: WorkerPair, request: CompletionRequest
) -> tuple[PrefillCompletion, DecodeCompletion]:
    prefill, decode = await asyncio.gather(
        workers.prefill.service.complete(request), workers.decode.service.complete(request)
    )
    assert isinstance(prefill, PrefillCompletion)
    assert isinstance(decode, DecodeCompletion)
    return prefill, decode


async def test_decode_gives_the_tokens_of_a_single_process(workers: WorkerPair) -> None:
    expected = single_process().generate(PROMPT, 20)
    prefill, decode = await complete(workers, workers.request(PROMPT, max_tokens=20))
    assert decode.choices[0].token_ids == expected
    assert decode.choices[0].text == bytes(expected).decode(errors="replace")
    assert decode.choices[0].finish_reason == "length"
    assert prefill.choices[0].token_ids == expected[:1]
    assert decode.usage.model_dump() == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 20,
        "total_tokens": len(PROMPT) + 20,
    }
    assert prefill.id == decode.id
    await eventually(workers.all_blocks_free)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 8), (8, 2), (4, 6), (6, 4)])
async def test_workers_of_different_block_sizes_give_the_same_tokens(
    prefill: int, decode: int
) -> None:
    expected = single_process().generate(PROMPT, 20)
    async with contextlib.AsyncExitStack() as stack:
        key = secrets.token_hex(16)
        workers = WorkerPair(
            await start_worker(stack, Role.PREFILL, key, "local", block_size=prefill),
            await start_worker(stack, Role.DECODE, key, "local", block_size=decode),
            key,
        )
        _, answer = await complete(workers, workers.request(PROMPT, max_tokens=20))
        assert answer.choices[0].token_ids == expected
        await eventually(workers.all_blocks_free)


async def test_the_load_reports_measurements_of_requests(workers: WorkerPair) -> None:
    prefill, decode = workers.prefill.service, workers.decode.service
    assert (decode.load().tokens_per_second, decode.load().ttft_p90) == (0, None)
    _, answer = await complete(workers, workers.request(PROMPT, max_tokens=20))
    load = decode.load()
    assert load.ttft_p90 == pytest.approx(answer.timings.first_token)
    assert load.itl_p90 is not None
    assert 0 < load.itl_p90 <= answer.timings.decode
    # The worker has had one request of twenty tokens since it began, however long ago that is.
    assert load.requests_per_second is not None
    assert load.tokens_per_second == pytest.approx(20 * load.requests_per_second, rel=0.1)
    load = prefill.load()
    assert load.requests_per_second is not None
    assert load.tokens_per_second == pytest.approx(len(PROMPT) * load.requests_per_second, rel=0.1)
    assert load.ttft_p90 is None, "decode is where the first token shows"


async def test_a_refused_request_does_not_count_as_load(workers: WorkerPair) -> None:
    forged = workers.request(PROMPT)
    forged.kv_transfer_params.ticket = forged.kv_transfer_params.ticket[:-4] + "AAAA"
    for worker in (workers.prefill, workers.decode):
        with pytest.raises(PromptTooLong):
            await worker.service.complete(workers.request([1] * 129, max_tokens=1))
        with pytest.raises(TicketInvalid):
            await worker.service.complete(forged)
        with worker.pool.hold(BLOCKS - 3), pytest.raises(BlockPoolExhausted):
            await worker.service.complete(workers.request(PROMPT, max_tokens=8))
        load = worker.service.load()
        assert (load.requests_per_second, load.tokens_per_second) == (0, 0)


async def test_prefill_reports_exactly_what_moved(workers: WorkerPair) -> None:
    prefill, decode = await complete(workers, workers.request(PROMPT, max_tokens=2))
    blocks = -(-len(PROMPT) // 4)
    stats = prefill.transfer
    assert stats.fabric == workers.decode.engine.peers[0].fabric
    assert stats.pages == blocks * TINY.num_layers * 2
    assert stats.bytes == blocks * 4 * TINY.num_kv_heads * TINY.head_size * 4 * TINY.num_layers * 2
    # A fresh pool gives out neighbouring blocks, so there is one write for each plane of each
    # layer.
    assert stats.writes == TINY.num_layers * 2
    assert 0 < stats.seconds < prefill.timings.prefill + prefill.timings.send
    assert decode.timings.prefill == prefill.timings.prefill


async def test_requests_at_the_same_time_do_not_mix(workers: WorkerPair) -> None:
    prompts = [f"prompt number {number}" for number in range(6)]
    expected = [single_process().generate(prompt, 6) for prompt in prompts]
    answers = await asyncio.gather(
        *(complete(workers, workers.request(prompt, max_tokens=6)) for prompt in prompts)
    )
    assert [decode.choices[0].token_ids for _, decode in answers] == expected
    await eventually(workers.all_blocks_free)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_side_may_come_first(workers: WorkerPair, first: str) -> None:
    sides = [workers.prefill, workers.decode]
    early, late = sides if first == "prefill" else reversed(sides)
    request = workers.request(PROMPT, max_tokens=4)
    waiting = asyncio.create_task(early.service.complete(request))
    await eventually(lambda: early.pool.num_free != BLOCKS)
    answers = [await late.service.complete(request), await waiting]
    decode = next(answer for answer in answers if isinstance(answer, DecodeCompletion))
    assert decode.choices[0].token_ids == single_process().generate(PROMPT, 4)
    await eventually(workers.all_blocks_free)


async def test_one_output_token_needs_no_decode_step(workers: WorkerPair) -> None:
    _, decode = await complete(workers, workers.request(PROMPT, max_tokens=1))
    assert decode.choices[0].token_ids == single_process().generate(PROMPT, 1)


async def test_a_prompt_that_does_not_fit_is_refused_by_both_sides(workers: WorkerPair) -> None:
    request = workers.request([1] * 129, max_tokens=1)
    for worker in (workers.prefill, workers.decode):
        with pytest.raises(PromptTooLong, match="does not fit the KV cache"):
            await worker.service.complete(request)
    assert workers.all_blocks_free()


async def test_full_pools_refuse_and_keep_what_they_have(workers: WorkerPair) -> None:
    request = workers.request(PROMPT, max_tokens=8)
    for worker in (workers.prefill, workers.decode):
        with worker.pool.hold(BLOCKS - 3), pytest.raises(BlockPoolExhausted):
            await worker.service.complete(request)
    assert workers.all_blocks_free()


async def test_another_model_is_refused(workers: WorkerPair) -> None:
    with pytest.raises(InvalidArgument, match="runs the model 'tiny', not 'huge'"):
        await workers.prefill.service.complete(workers.request(PROMPT, model="huge"))


async def test_a_forged_ticket_is_refused(workers: WorkerPair) -> None:
    request = workers.request(PROMPT)
    request.kv_transfer_params.ticket = request.kv_transfer_params.ticket[:-4] + "AAAA"
    for worker in (workers.prefill, workers.decode):
        with pytest.raises(TicketInvalid):
            await worker.service.complete(request)
    assert workers.all_blocks_free()


async def test_two_different_prompts_under_one_ticket_are_refused(workers: WorkerPair) -> None:
    request = workers.request(PROMPT, max_tokens=2)
    other = request.model_copy(update={"prompt": PROMPT[::-1]})
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    with pytest.raises(InvalidArgument, match="prefill computed another prompt"):
        await workers.decode.service.complete(other)
    await prefill
    await eventually(workers.all_blocks_free)


async def test_a_cancelled_decode_request_ends_prefill_and_frees_both_sides(
    workers: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = hold_prefill_at(workers, monkeypatch, layer=1)
    request = workers.request(PROMPT, max_tokens=4)
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    decode = asyncio.create_task(workers.decode.service.complete(request))
    await asyncio.to_thread(layers.reached.wait)
    await eventually(lambda: workers.decode.pool.counts()[BlockState.RECEIVING] > 0)
    decode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decode
    await eventually(lambda: workers.decode.pool.num_free == BLOCKS)
    # The computation still writes to its blocks.
    assert workers.prefill.pool.num_free < BLOCKS
    layers.go_on.set()
    with pytest.raises(TransferCancelled):
        await prefill
    await eventually(workers.all_blocks_free)


async def test_a_cancelled_prefill_request_ends_decode_and_frees_both_sides(
    workers: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = hold_prefill_at(workers, monkeypatch, layer=1)
    request = workers.request(PROMPT, max_tokens=4)
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    decode = asyncio.create_task(workers.decode.service.complete(request))
    await asyncio.to_thread(layers.reached.wait)
    prefill.cancel()
    await asyncio.sleep(0)
    assert workers.prefill.pool.num_free < BLOCKS
    layers.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    with pytest.raises(KvxferError, match="cancelled"):
        await decode
    await eventually(workers.all_blocks_free)
    # The layer at which it was held is the last one that it computed.
    assert layers.computed == [0, 1]


async def test_blocks_of_a_cancelled_prefill_are_freed_when_its_stream_has_ended(
    workers: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, queued kernels still write into the blocks."""
    free_at_settle: list[int] = []

    class Order(StreamOrder):
        def __init__(self) -> None:
            self.word = workers.prefill.engine.watcher()

        def mark(self) -> WatchFor:
            return self.word.at(0)

        def settle(self) -> None:
            free_at_settle.append(workers.prefill.pool.num_free)

    monkeypatch.setattr(workers.prefill.service, "_on_gpu", Order())
    await complete(workers, workers.request(PROMPT, max_tokens=2))
    assert free_at_settle == [], "what has ended need not be waited for"
    layers = hold_prefill_at(workers, monkeypatch, layer=1)
    prefill = asyncio.create_task(
        workers.prefill.service.complete(workers.request(PROMPT, max_tokens=4))
    )
    await asyncio.to_thread(layers.reached.wait)
    prefill.cancel()
    await asyncio.sleep(0)  # it has to see the cancellation before it computes the last layer
    layers.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    assert len(free_at_settle) == 1
    assert free_at_settle[0] < BLOCKS
    await eventually(workers.all_blocks_free)


async def test_a_request_that_is_cancelled_while_it_decodes_frees_its_blocks(
    workers: WorkerPair,
) -> None:
    request = workers.request(PROMPT, max_tokens=90)
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    decode = asyncio.create_task(workers.decode.service.complete(request))
    await prefill
    await eventually(lambda: workers.decode.pool.counts()[BlockState.HELD] >= 30)
    decode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decode
    await eventually(workers.all_blocks_free)


class Layers:
    """The progress of a held prefill, and the event that continues it."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.computed: list[int] = []


def hold_prefill_at(workers: WorkerPair, monkeypatch: pytest.MonkeyPatch, layer: int) -> Layers:
    """Makes the next prefill stop at this layer until `go_on` is set."""
    layers = Layers()
    runner = workers.prefill.service.runner
    prefill = runner.prefill

    def held(tokens, blocks, on_layer):  # type: ignore[no-untyped-def]
        def hold(index: int) -> None:
            layers.computed.append(index)
            if index == layer:
                layers.reached.set()
                layers.go_on.wait()
            on_layer(index)

        return prefill(tokens, blocks, hold)

    monkeypatch.setattr(runner, "prefill", held)
    return layers


async def test_a_worker_takes_the_side_that_a_ticket_gives_it(workers: WorkerPair) -> None:
    """After a change of role, requests paired before go on, and new ones use the other side."""
    before = workers.request(PROMPT, max_tokens=8)
    workers.prefill.service.take_role(Role.DECODE)
    workers.decode.service.take_role(Role.PREFILL)
    await complete(workers, before)
    after = workers.request(PROMPT, max_tokens=8, turned=True)
    turned = WorkerPair(workers.decode, workers.prefill, workers.cluster_key)
    _, decode = await complete(turned, after)
    assert decode.choices[0].token_ids == single_process().generate(PROMPT, 8)
    await eventually(workers.all_blocks_free)
