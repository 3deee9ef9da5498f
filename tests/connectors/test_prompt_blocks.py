"""The blocks of a prompt that are moved, with a sliding window, with a state, and without."""

from __future__ import annotations

import pytest

from kvxfer.connectors.vllm.plan import Receive, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import NULL_BLOCK, BlockGroup, PromptBlocks
from kvxfer.connectors.vllm.scheduler import Scheduled, TransferScheduler
from kvxfer.instances import Role

PARAMS = TransferParams("ticket", "kvx://127.0.0.1:1/0")
BLOCKS = PromptBlocks(16, (BlockGroup(), BlockGroup(window=20)))


@pytest.mark.parametrize(
    ("prompt", "count"), [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_decode_computes_the_last_token_itself(prompt: int, count: int) -> None:
    assert BLOCKS.count(prompt) == count


@pytest.mark.parametrize(
    ("prompt", "moved", "count"), [(1, 0, 1), (3, 0, 1), (4, 1, 1), (19, 16, 1), (20, 17, 2)]
)
def test_decode_computes_the_tokens_guessed_by_modules_of_a_draft_model(
    prompt: int, moved: int, count: int
) -> None:
    blocks = PromptBlocks(16, last_tokens=3)
    assert (blocks.moved(prompt), blocks.count(prompt)) == (moved, count)
    side = TransferScheduler(blocks, lambda params: Role.DECODE, 10.0)
    side.arrived("r", PARAMS, prompt, b"digest")
    assert side.external_tokens("r", 0) == moved
    side.allocated("r", [[5, 6]], moved)
    assert [receive.first_block for receive in side.step([], ()).receives] == [0] * (moved > 0)


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("window", [2, 16, 17, 20, 32, 100])
def test_the_first_block_is_that_of_the_first_token_that_the_last_one_attends_to(
    window: int,
    last: int,
) -> None:
    blocks = PromptBlocks(16, (BlockGroup(), BlockGroup(window=window)), last)
    for prompt in range(last, 130):
        attended = [at for at in range(prompt) if prompt - last - at < window]
        assert blocks.first(blocks.groups[1], prompt) == attended[0] // 16
        assert blocks.first(blocks.groups[0], prompt) == 0


def test_a_block_outside_of_the_window_is_never_sent() -> None:
    rows = [[7, 8, 9, 4], [5, 6, 1, 2]]
    assert BLOCKS.table(rows, 60) == ((7, 8, 9, 4), (NULL_BLOCK, NULL_BLOCK, 1, 2))
    assert BLOCKS.table([[7], [5]], 60) == ((7,), (NULL_BLOCK,)), "the first chunk"
    assert BLOCKS.table(rows, 20) == ((7, 8), (5, 6))
    assert BLOCKS.table(rows, 33) == ((7, 8), (5, 6)), "of two blocks and a token"


def test_a_table_for_other_groups_does_not_end_the_engine() -> None:
    assert BLOCKS.table([], 60) == ()
    assert BLOCKS.table([[7, 8]], 60) == ((7, 8),)


def test_each_step_sends_the_blocks_of_each_group() -> None:
    side = TransferScheduler(BLOCKS, lambda params: Role.PREFILL, 10.0)
    side.arrived("r", PARAMS, 60, b"digest")
    assert side.sent_tokens("r") is None
    # The first two blocks are in the prefix cache; only the second is left of the window.
    [send] = side.step([Scheduled("r", ([7, 8], [NULL_BLOCK, 6]), 32, 0)], ()).sends
    assert (send.until, send.block_ids) == (2, ((7, 8), (NULL_BLOCK, NULL_BLOCK)))
    [send] = side.step([Scheduled("r", ([9], [1]), 32, 16)], ()).sends
    assert (send.until, send.block_ids) == (3, ((7, 8, 9), (NULL_BLOCK, NULL_BLOCK, 1)))
    [send] = side.step([Scheduled("r", ([4], [2]), 48, 12)], ()).sends
    assert (send.until, send.block_ids) == (4, ((7, 8, 9, 4), (NULL_BLOCK, NULL_BLOCK, 1, 2)))
    assert side.sent_tokens("r") == 60
    side.step([Scheduled("r", (), 60, 1)], ())
    assert side.finished("r", "stopped")
    assert side.sent_tokens("r") is None


LARGE = PromptBlocks(16, (BlockGroup(), BlockGroup(window=20, entries=2), BlockGroup(entries=3)))


def test_a_large_block_is_in_the_last_of_its_entries() -> None:
    rows = [[7, 8, 9, 4], [5, 6], [1, 2]]
    none = NULL_BLOCK
    # 59 tokens: four blocks of 16, two of 32, two of 48.
    assert LARGE.count(60) == 6
    assert LARGE.table(rows, 60) == (
        (7, 8, 9, 4, none, none),
        (none, none, none, 6, none, none),
        (none, none, 1, none, none, 2),
    )
    # 32 tokens are moved; the 13th is the first one in the window of the 33rd.
    assert LARGE.table(rows, 33) == ((7, 8, none), (none, 5, none), (none, none, 1))
    assert LARGE.table([[7, 8, 9], [5, 6], [1]], 60) == (
        (7, 8, 9, none),
        (none, none, none, 6),
        (none, none, 1, none),
    ), "as far as they are allocated"


def test_a_large_block_is_complete_with_the_last_of_its_entries() -> None:
    """A step completes only entries that end a block of every size."""
    side = TransferScheduler(LARGE, lambda params: Role.PREFILL, 10.0)
    side.arrived("r", PARAMS, 60, b"digest")
    ends = []
    ids: tuple[list[int], ...] = ([7, 8, 9, 4], [5, 6], [1, 2])
    for computed, tokens in ((0, 40), (40, 10), (50, 10)):
        [send] = side.step([Scheduled("r", ids, computed, tokens)], ()).sends
        ends.append(send.until)
        ids = ()
    assert (ends, send.num_blocks) == ([2, 3, 6], 6)


def test_decode_offers_the_missing_blocks_of_each_group() -> None:
    side = TransferScheduler(BLOCKS, lambda params: Role.DECODE, 10.0)
    side.arrived("r", PARAMS, 60, b"digest")
    assert side.external_tokens("r", 16) == 43
    side.allocated("r", ([7, 8, 9, 4], [NULL_BLOCK, NULL_BLOCK, 1, 2]), 43)
    [receive] = side.step((), ()).receives
    assert receive == Receive("r", PARAMS, b"digest", 1, ((8, 9, 4), (NULL_BLOCK, 1, 2)))


@pytest.mark.parametrize("single", [True, False])
def test_the_block_with_the_state_after_the_last_moved_token_is_sent(single: bool) -> None:
    blocks = PromptBlocks(16, (BlockGroup(), BlockGroup(state=True, single=single)))
    assert blocks.exact
    assert not BLOCKS.exact
    # vLLM has one block for a request, and more to speculate with; or one in each place.
    for prompt, whole in ((60, [5, 6, 1, 2]), (50, [5, 6, 1, 2]), (49, [5, 6, 1]), (48, [5, 6, 1])):
        states = [9, 8] if single else whole
        last = 9 if single else whole[-1]
        *others, travels = blocks.table([whole, states], prompt)[1]
        assert (others, travels) == ([NULL_BLOCK] * (len(whole) - 1), last)
        assert list(blocks.in_place(blocks.groups[1], states, prompt).items()) == [
            (len(whole) - 1, last)
        ]


@pytest.mark.parametrize("single", [True, False])
def test_a_state_is_offered_and_sent_with_the_last_block(single: bool) -> None:
    blocks = PromptBlocks(16, (BlockGroup(), BlockGroup(state=True, single=single)))
    states = [9] if single else [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 9]
    decode = TransferScheduler(blocks, lambda params: Role.DECODE, 10.0)
    decode.arrived("r", PARAMS, 60, b"digest")
    assert not decode.sends("r")
    decode.allocated("r", ([7, 8, 3, 4], states), 43)
    [receive] = decode.step((), ()).receives
    assert receive.block_ids == ((8, 3, 4), (NULL_BLOCK, NULL_BLOCK, 9))

    prefill = TransferScheduler(blocks, lambda params: Role.PREFILL, 10.0)
    prefill.arrived("r", PARAMS, 60, b"digest")
    assert prefill.sends("r")
    first = [9] if single else [NULL_BLOCK, 6]
    [send] = prefill.step([Scheduled("r", ([7, 8], first), 0, 32)], ()).sends
    assert send.until == 2
    assert set(send.block_ids[1][:2]) == {NULL_BLOCK}
    more = [] if single else [NULL_BLOCK, 9]
    [send] = prefill.step([Scheduled("r", ([3, 4], more), 32, 27)], ()).sends
    assert (send.until, send.block_ids[1]) == (4, (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 9))
