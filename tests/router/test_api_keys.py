"""The rate at which wrong API keys are answered; it does not delay right ones."""

from __future__ import annotations

import math
from pathlib import Path

import httpx2

from kvxfer.instances import Role
from kvxfer.router.api_keys import watch_api_keys
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.web.rate_limit import WRONG_TOKENS_AT_ONCE, WRONG_TOKENS_PER_SECOND
from tests.network import Network
from tests.virtual_time import passes

from .servers import PREFILLS

RIGHT, WRONG = "0123456789abcdef0123", "not-the-one-of-alice"
REFUSED = [
    ("POST", "/v1/completions", {"model": "llama", "prompt": "hi"}),
    ("POST", "/v1/chat/completions", {"model": "llama", "messages": []}),
    ("GET", "/v1/models", None),
]


async def test_wrong_keys_are_answered_at_a_rate_and_right_ones_always(
    network: Network, control_plane: EmbeddedRegistry, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {RIGHT}\n")
    await network.join("p", Role.PREFILL, PREFILLS)
    async with network.routed(api_keys=watch_api_keys(keys)) as client:

        async def ask(method: str, path: str, body: object, key: str) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.request(method, path, json=body, headers=headers)

        for number in range(WRONG_TOKENS_AT_ONCE):
            answer = await ask("GET", "/v1/models", None, f"{WRONG}-{number}")
            assert answer.status_code == 401
        for refused in REFUSED:
            answer = await ask(*refused, WRONG)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert "the address 127.0.0.1" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == str(math.ceil(1 / WRONG_TOKENS_PER_SECOND))
        answer = await ask("GET", "/v1/models", None, RIGHT)
        assert [model["id"] for model in answer.json()["data"]] == ["llama"]
        answer = await client.get("/v1/models")
        assert answer.status_code == 401, "a request without a key is not a guess"

        await passes(1 / WRONG_TOKENS_PER_SECOND)
        statuses = [(await ask("GET", "/v1/models", None, WRONG)).status_code for _ in range(2)]
        assert statuses == [401, 429]
