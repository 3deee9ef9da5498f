"""The prompts that prefill keeps for decode to fetch, and its reply to the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connectors.vllm.plan import Send, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import PromptBlocks
from kvxfer.connectors.vllm.pull import KeptPrompts, Source, is_pull
from kvxfer.ticket import TicketKeys, verify_ticket
from tests.virtual_time import VirtualClock

KEYS = TicketKeys([b"a cluster key of enough bytes"])
ADDRESSES = ("kvx://10.0.0.7:4000/aa", "kvx://10.0.0.7:4001/bb")
DIGEST = b"the prompt's digest"
BLOCK = 16
# vLLM's proxies ask for it so: with nulls where the reply has values.
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def kept_prompts(clock: VirtualClock | None = None) -> KeptPrompts:
    clock = clock or VirtualClock()
    made = KeptPrompts("prefill-0", PromptBlocks(BLOCK), 30.0, lambda: KEYS, clock=clock)
    made.source = Source(7, ADDRESSES)
    return made


def finish(kept: KeptPrompts, request_id: str) -> tuple[Send, dict[str, Any]]:
    send, reply = kept.finished(request_id, [[5, 3, 8, 9]], computed=True)
    assert send is not None and reply is not None
    return send, reply


def test_the_reply_lets_any_decode_worker_fetch_this_prompt() -> None:
    clock = VirtualClock()
    kept = kept_prompts(clock)
    kept.arrived("r", 34, DIGEST)
    assert kept.tokens("r") == 34
    send, reply = finish(kept, "r")
    ticket = verify_ticket(reply["ticket"], KEYS, now=clock.unix())
    assert ticket.bearer
    assert (ticket.prefill_id, ticket.prefill_epoch) == ("prefill-0", 7)
    assert (ticket.request_id, ticket.prompt_digest) == ("r", DIGEST)
    # Decode may ask to keep it beyond the lease, for up to ten leases.
    assert ticket.expires_at == clock.unix() + 300
    # Decode reads the reply like the control plane's answer.
    params = TransferParams.of(reply)
    assert params == TransferParams(reply["ticket"], ADDRESSES[0], ADDRESSES)
    # All of the prompt, without the block that a later token has begun.
    assert send == Send("r", params, DIGEST, 3, ((5, 3, 8),), 3)
    assert (reply["do_remote_prefill"], reply["do_remote_decode"]) == (True, False)
    assert (reply["remote_host"], reply["remote_port"]) == ("10.0.0.7", 4000)
    assert len(kept) == 0


def test_a_prompt_that_was_not_computed_is_not_kept() -> None:
    kept = kept_prompts()
    kept.arrived("r", 33, DIGEST)
    assert kept.finished("r", [[5]], computed=False) == (None, None)
    assert kept.finished("another", [[5]], computed=True) == (None, None)
    assert len(kept) == 0


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_samples_of_one_request_are_kept_once_and_have_one_reply(one_by_one: bool) -> None:
    kept = kept_prompts()
    kept.arrived("0_r-1f", 33, DIGEST)
    kept.arrived("1_r-1f", 33, DIGEST)
    if not one_by_one:
        kept.arrived("2_r-1f", 33, DIGEST)
    assert kept.finished("0_r-1f", [[5]], computed=False) == (None, None)
    _, reply = finish(kept, "1_r-1f")
    if one_by_one:
        kept.arrived("2_r-1f", 33, DIGEST)
    assert kept.finished("2_r-1f", [[7, 3, 8]], computed=True) == (None, reply)


def test_the_shared_state_of_samples_is_dropped_with_their_lease() -> None:
    clock = VirtualClock()
    kept = kept_prompts(clock)
    for name, remembered in (("0_a", 1), ("0_b", 2), ("0_c", 2)):
        kept.arrived(name, 33, DIGEST)
        finish(kept, name)
        assert len(kept._replies) == remembered
        clock.advance(15)


@pytest.mark.parametrize("other", [("1_r-2f", DIGEST), ("1_r-1f", b"other")])
def test_other_requests_have_other_tickets(other: tuple[str, bytes]) -> None:
    kept = kept_prompts()
    kept.arrived("0_r-1f", 33, DIGEST)
    kept.arrived(other[0], 33, other[1])
    assert finish(kept, "0_r-1f")[1]["ticket"] != finish(kept, other[0])[1]["ticket"]


@pytest.mark.parametrize(
    ("params", "pull"),
    [
        (None, False),
        ({}, False),
        (ASKED, True),
        ({"do_remote_decode": False}, False),
        ({**ASKED, "ticket": "t"}, False),
    ],
)
def test_prefill_is_asked_to_keep_a_prompt_by_do_remote_decode(
    params: dict[str, Any] | None, pull: bool
) -> None:
    assert is_pull(params) is pull
