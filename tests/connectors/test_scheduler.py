"""The scheduler side of the vLLM connector, step by step."""

from __future__ import annotations

import pytest

from kvxfer.connectors.vllm.plan import Receive, StepPlan, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import PromptBlocks
from kvxfer.connectors.vllm.scheduler import Scheduled, TransferScheduler
from kvxfer.instances import Role
from tests.virtual_time import VirtualClock

PARAMS = TransferParams("ticket", "kvx://127.0.0.1:1/0")
DIGEST = b"digest"
BLOCK = 16


KEEP_SECONDS = 10.0
LEASE_SECONDS = 3 * KEEP_SECONDS


def scheduler(
    side: Role | None, prompt_tokens: int, clock: VirtualClock | None = None
) -> TransferScheduler:
    clock = clock or VirtualClock()
    made = TransferScheduler(PromptBlocks(BLOCK), lambda params: side, LEASE_SECONDS, clock=clock)
    made.arrived("r", PARAMS, prompt_tokens, DIGEST)
    return made


@pytest.mark.parametrize(
    ("prompt", "steps", "until"),
    [
        (1, [(0, 1)], [1]),
        (5, [(0, 5)], [1]),
        (17, [(0, 17)], [1]),  # decode computes the last token, which is in another block
        (18, [(0, 18)], [2]),
        (100, [(0, 40), (40, 40), (80, 20)], [2, 5, 7]),
        (100, [(0, 10), (10, 90)], [0, 7]),  # a chunk smaller than a block
        (100, [(96, 4)], [7]),  # a hit in prefill's prefix cache: its blocks are sent, too
        (20, [(0, 20), (20, 1), (21, 1)], [2]),  # tokens after the prompt are not sent
    ],
)
def test_each_step_sends_the_blocks_that_it_completes(
    prompt: int, steps: list[tuple[int, int]], until: list[int]
) -> None:
    side = scheduler(Role.PREFILL, prompt)
    total = PromptBlocks(BLOCK).count(prompt)
    planned, blocks = [], 0
    for computed, tokens in steps:
        needed = -(-(computed + tokens) // BLOCK)
        new, blocks = range(100 + blocks, 100 + needed), needed
        planned += side.step([Scheduled("r", [new], computed, tokens)], ()).sends
    assert [send.until for send in planned] == until
    assert {send.num_blocks for send in planned} == {total}
    assert all(len(send.block_ids[0]) >= send.until for send in planned)
    assert planned[-1].block_ids == (tuple(range(100, 100 + total)),)
    assert side.finished("r", "stopped")
    assert side.step((), ()) == StepPlan()


@pytest.mark.parametrize(
    ("prompt", "computed", "first", "offered"),
    [(5, 0, 0, [7]), (33, 0, 0, [7, 8]), (34, 16, 1, [8, 9]), (34, 32, 2, [9])],
)
def test_decode_offers_exactly_the_blocks_that_are_missing(
    prompt: int, computed: int, first: int, offered: list[int]
) -> None:
    side = scheduler(Role.DECODE, prompt)
    for _ in range(2):  # vLLM may ask twice
        assert side.external_tokens("r", computed) == prompt - 1 - computed
    side.allocated("r", [[7, 8, 9, 10]], prompt - 1 - computed)
    side.allocated("r", [[7, 8, 9, 10]], 0)  # vLLM reports allocations twice
    plan = side.step([Scheduled("r", (), prompt, 1)], ())
    assert plan.receives == [Receive("r", PARAMS, DIGEST, first, (tuple(offered),))]
    assert (plan.sends, side.step((), ())) == ([], StepPlan())


@pytest.mark.parametrize(("prompt", "computed"), [(33, 32), (32, 31), (1, 0)])
def test_decode_releases_prefill_if_only_the_last_token_is_missing(
    prompt: int, computed: int
) -> None:
    side = scheduler(Role.DECODE, prompt)
    assert side.external_tokens("r", computed) == 0
    side.allocated("r", [[7, 8, 9]], 0)
    assert side.step((), ()).releases == [(PARAMS, "decode does not need it")]
    assert not side.finished("r", "stopped")
    assert side.step((), ()) == StepPlan()


def test_a_decode_request_that_never_got_blocks_releases_prefill() -> None:
    side = scheduler(Role.DECODE, 33)
    assert not side.finished("r", "aborted")
    assert side.step((), ()).releases == [(PARAMS, "aborted")]


def test_a_decode_request_that_waits_for_blocks_is_reported_to_prefill_repeatedly() -> None:
    clock = VirtualClock()
    side = scheduler(Role.DECODE, 33, clock)
    side.arrived("second", PARAMS, 33, DIGEST)
    heard = []
    for _ in range(5):
        heard.append(side.step((), ()).waiting)
        clock.advance(KEEP_SECONDS / 2)
    assert heard == [[PARAMS], [], [PARAMS], [], [PARAMS]]
    side.allocated("r", [[7, 8, 9]], 32)
    clock.advance(KEEP_SECONDS)
    assert side.step((), ()).waiting == []


def test_a_request_that_has_blocks_at_once_or_is_not_of_decode_is_not_reported_to_prefill() -> None:
    side = scheduler(Role.DECODE, 33)
    side.allocated("r", [[7, 8, 9]], 32)
    assert side.step((), ()).waiting == []
    assert scheduler(Role.PREFILL, 33).step((), ()).waiting == []


@pytest.mark.parametrize("end", ["received", "aborted", "never allocated", "cached"])
def test_other_requests_with_the_same_ticket_wait_for_the_first(end: str) -> None:
    side = scheduler(Role.DECODE, 33)
    side.arrived("second", PARAMS, 33, DIGEST)
    assert side.external_tokens("second", 0) is None
    if end == "cached":
        side.allocated("r", [[7, 8, 9]], 0)
    elif end != "never allocated":
        side.allocated("r", [[7, 8, 9]], 32)
        assert side.external_tokens("second", 0) is None
    if end == "received":
        side.received({"r"})
    elif end != "cached":
        side.finished("r", "aborted")
    assert side.external_tokens("second", 32) == 0
    side.allocated("second", [[7, 8, 4]], 0)
    plan = side.step((), ())
    assert len(plan.receives) + len(plan.releases) == 1, "one request has the transfer"
    side.finished("r", "stopped")
    side.finished("second", "stopped")
    assert side.step((), ()) == StepPlan()
    assert not side._leaders


def test_prefill_sends_once_for_requests_with_the_same_ticket() -> None:
    side = scheduler(Role.PREFILL, 33)
    side.arrived("second", PARAMS, 33, DIGEST)
    steps = [Scheduled(name, [[1, 2, 3]], 0, 33) for name in ("r", "second")]
    assert [send.request_id for send in side.step(steps, ()).sends] == ["r"]
    assert side.finished("r", "stopped")
    assert not side.finished("second", "stopped")


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_a_sample_that_arrives_after_the_end_of_the_first_has_no_transfer(side: Role) -> None:
    clock = VirtualClock()
    samples = scheduler(side, 33, clock)
    samples.arrived("0_s", TransferParams("of samples", "kvx://127.0.0.1:1/0"), 33, DIGEST)
    samples.allocated("0_s", [[1, 2, 3]], 32)
    samples.step([Scheduled("0_s", [[1, 2, 3]], 0, 33)], ())
    samples.received({"0_s"})
    samples.finished("0_s", "stopped")

    def transfers(request_id: str) -> bool:
        samples.arrived(request_id, TransferParams("of samples", "kvx://127.0.0.1:1/0"), 33, DIGEST)
        samples.allocated(request_id, [[4, 5, 6]], samples.external_tokens(request_id, 0) or 0)
        plan = samples.step([Scheduled(request_id, [[4, 5, 6]], 0, 33)], ())
        samples.finished(request_id, "stopped")
        return bool(plan.sends or plan.receives)

    assert not transfers("1_s")
    assert not transfers("2_s")
    assert transfers("0_of-another-request"), "the ticket is refused where it is used again"
    clock.advance(LEASE_SECONDS)
    assert transfers("3_s"), "what is long over is forgotten"


def test_a_request_is_received_once_and_computed_here_after_a_failure() -> None:
    side = scheduler(Role.DECODE, 33)
    side.allocated("r", [[7, 8, 9]], 32)
    side.step((), ())
    side.received({"r", "another"})
    assert side.external_tokens("r", 0) == 0
    assert not side.finished("r", "stopped")
    assert side.step((), ()) == StepPlan()


def test_decode_gives_up_a_transfer_whose_request_is_aborted() -> None:
    side = scheduler(Role.DECODE, 33)
    side.allocated("r", [[7, 8, 9]], 32)
    side.step((), ())
    assert not side.finished("r", "aborted")  # vLLM keeps the blocks itself
    assert side.step((), ()).cancels == {"r": "aborted"}
    assert len(side) == 0


def test_prefill_gives_up_a_transfer_that_is_aborted_half_way() -> None:
    side = scheduler(Role.PREFILL, 33)
    side.step([Scheduled("r", [[1]], 0, 16)], ())
    assert side.finished("r", "aborted"), "blocks are kept until nothing reads them"
    assert side.step((), ()).cancels == {"r": "aborted"}


def test_a_computed_prompt_is_sent_even_if_its_request_is_aborted() -> None:
    side = scheduler(Role.PREFILL, 33)
    side.step([Scheduled("r", [[1, 2, 3]], 0, 33)], ())
    assert side.finished("r", "aborted")
    assert side.step((), ()).cancels == {}


def test_a_prefill_request_that_never_ran_ends_decode() -> None:
    side = scheduler(Role.PREFILL, 33)
    assert not side.finished("r", "aborted")
    assert side.step((), ()).unserved == [(PARAMS, "aborted")]


def test_a_preempted_prefill_ends_its_transfer_and_becomes_an_ordinary_request() -> None:
    side = scheduler(Role.PREFILL, 33)
    side.step([Scheduled("r", [[1]], 0, 16)], ())
    plan = side.step((), {"r", "another"})
    assert plan.preempted == ["r"]
    assert side.step([Scheduled("r", [[4, 5, 6]], 0, 33)], ()).sends == []
    assert not side.finished("r", "stopped")


def test_requests_without_a_ticket_or_with_one_for_other_workers_are_ordinary() -> None:
    nobody = TransferScheduler(PromptBlocks(BLOCK), lambda params: Role.DECODE, LEASE_SECONDS)
    for side in (scheduler(None, 33), nobody):
        assert side.external_tokens("r", 0) == 0
        side.allocated("r", [[1, 2, 3]], 0)
        assert side.step([Scheduled("r", [[1, 2, 3]], 0, 33)], {"r"}) == StepPlan()
        assert not side.finished("r", "stopped")
