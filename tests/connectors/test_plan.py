from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connectors.vllm.plan import TransferParams
from kvxfer.errors import InvalidArgument

ADDRESS = "kvx://127.0.0.1:1/0"


def test_the_parameters_of_the_router_are_read() -> None:
    params = {"ticket": "t", "prefill_engine_address": ADDRESS}
    assert TransferParams.of(params) == TransferParams("t", ADDRESS)
    params["prefill_rank_addresses"] = [ADDRESS, "b"]  # type: ignore[assignment]
    assert TransferParams.of(params) == TransferParams("t", ADDRESS, (ADDRESS, "b"))


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_without_a_ticket_a_request_is_an_ordinary_one(params: dict[str, Any] | None) -> None:
    assert TransferParams.of(params) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ticket": 5}, "ticket and prefill_engine_address are strings"),
        ({"prefill_engine_address": None}, "ticket and prefill_engine_address are strings"),
        ({"prefill_rank_addresses": "x"}, "prefill_rank_addresses is a list"),
        ({"handshake": "brokered"}, "'brokered'; this connector speaks the direct one"),
    ],
)
def test_invalid_parameters_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        TransferParams.of({"ticket": "t", "prefill_engine_address": ADDRESS, **wrong})
