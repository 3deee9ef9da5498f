"""Transfers between caches of one model, of two models, and of one that was updated meanwhile."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvxfer.errors import KvxferError, LayoutMismatch, TransferCancelled, TransferRefused
from kvxfer.kv import connection as connections
from kvxfer.model_identity import FIELDS, ModelIdentity
from verify.polling import PATIENCE

from .workers import NUM_BLOCKS, Worker, accepted, make_ticket, receive, send, worker

pytestmark = pytest.mark.native

MODEL = ModelIdentity(
    checkpoint="a" * 32,
    weights_version=1,
    model_dtype="bfloat16",
    quantization="awq",
    kv_scales="static",
    rope="{}",
    sliding_window="4096",
    connector="vllm/1",
)


def but(**changes: Any) -> ModelIdentity:
    told = {field: getattr(MODEL, field) for field in FIELDS}
    return ModelIdentity(**{**told, **changes})


async def refused(prefill: Worker, decode: Worker, rng: random.Random) -> str:
    """Returns decode's error of a transfer, which also fails at prefill, and moves nothing."""
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(2) as hold:
        session = await prefill.endpoint.prefill_session(ticket, hold, lease_seconds=PATIENCE)
        session.write_layer(0)
        with pytest.raises(KvxferError) as error:
            await receive(prefill, decode, ticket, 2)
        assert session.writes == 0
        await session.cancel("the test ends")
    return str(error.value)


async def test_equal_models_exchange_their_caches(fabric: str, rng: random.Random) -> None:
    async with (
        worker("p", fabric, model=MODEL) as prefill,
        worker("d", fabric, model=but()) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        sent, received = await asyncio.gather(
            send(prefill, ticket, 3, rng), receive(prefill, decode, ticket, 3)
        )
        assert sent == received


@pytest.mark.parametrize("field", FIELDS)
async def test_the_error_names_what_differs_with_both_values(
    field: str, rng: random.Random
) -> None:
    other = but(**{field: 2 if field == "weights_version" else "other"})
    async with (
        worker("p", "local", model=MODEL) as prefill,
        worker("d", "local", model=other) as decode,
    ):
        said = await refused(prefill, decode, rng)
        ours, theirs = getattr(MODEL, field), getattr(other, field)
        assert f"{field} is {ours!r} at prefill and {theirs!r} at decode" in said


async def test_prefill_refuses_even_if_decode_does_not_check(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        worker("p", "local", model=MODEL) as prefill,
        worker("d", "local", model=but(checkpoint="b" * 32)) as decode,
    ):
        (ours,) = [
            one
            for one in [await decode.endpoint._connections.meet(prefill.engine.address)]
            if one.hello.instance_id == "p"
        ]
        monkeypatch.setattr(ours, "require_same_model", lambda side: None)
        said = await refused(prefill, decode, rng)
        assert "layout-mismatch" in said
        assert "checkpoint is" in said


async def test_an_update_of_weights_ends_transfers_computed_before(rng: random.Random) -> None:
    async with (
        worker("p", "local", model=MODEL) as prefill,
        worker("d", "local", model=MODEL) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
        with prefill.pool.hold(3) as hold:
            sender = await prefill.endpoint.prefill_session(ticket, hold)
            await accepted(receiver)
            await prefill.endpoint.set_model(but(weights_version=2))
            for session in (sender, receiver):
                with pytest.raises(TransferCancelled, match="the weights of 'p' were updated"):
                    await asyncio.wait_for(session.wait(), PATIENCE)
        assert decode.pool.num_free == NUM_BLOCKS

        said = await refused(prefill, decode, rng)
        assert "weights_version is 2 at prefill and 1 at decode" in said
        await decode.endpoint.set_model(but(weights_version=2))
        ticket = make_ticket(prefill, decode)
        sent, received = await asyncio.gather(
            send(prefill, ticket, 3, rng), receive(prefill, decode, ticket, 3)
        )
        assert sent == received


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "ticket"),
    [("aa", "bb", ""), ("aa", "", ""), ("", "bb", ""), ("aa", "bb", "aa")],
    ids=["two", "none at decode", "none at prefill", "by the ticket"],
)
async def test_another_adapter_is_refused_before_a_byte_moves(
    pair: tuple[Worker, Worker], at_prefill: str, at_decode: str, ticket: str
) -> None:
    prefill, decode = pair
    token = make_ticket(prefill, decode, adapter=ticket)
    with prefill.pool.hold(2) as hold:
        sender = await prefill.endpoint.prefill_session(token, hold, adapter=at_prefill)
        sender.write_layer(0)
        kind: type[KvxferError] = LayoutMismatch if ticket else TransferRefused
        with pytest.raises(kind) as error:
            async with decode.endpoint.decode_session(
                token, prefill.engine.address, 2, adapter=at_decode
            ) as receiver:
                await receiver.wait()
        assert f"adapter is {at_prefill!r} at prefill and {at_decode!r}" in str(error.value)
        assert sender.writes == 0
        await sender.cancel("the test ends")


@pytest.mark.parametrize("old", ["p", "d"])
async def test_a_side_of_version_7_is_served_and_named(
    old: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulates a rolling upgrade: the other side reports neither its model nor a range of
    versions."""
    told = connections.hello_from

    def as_before(cache: Any, identity: Any, *, checksums: bool = False) -> Any:
        hello = told(cache, identity, checksums=checksums)
        if identity.instance_id != old:
            return hello
        kept = {"newest": 0, "model": None}
        return type(hello)(**{n: kept.get(n, getattr(hello, n)) for n in hello.__struct_fields__})

    monkeypatch.setattr("kvxfer.kv.connections.hello_from", as_before)
    async with (
        worker("p", "local", model=MODEL) as prefill,
        worker("d", "local", model=MODEL) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        sent, received = await asyncio.gather(
            send(prefill, ticket, 3, rng), receive(prefill, decode, ticket, 3)
        )
        assert sent == received
    assert f"instance {old!r} does not report the model of its KV cache" in caplog.text
