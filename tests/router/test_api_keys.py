"""How fast wrong API keys are answered, and that right ones are not held up by them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kvxfer.api.access import FAILURE_BURST
from kvxfer.client import ControlPlaneClient
from kvxfer.instances import InstanceState
from kvxfer.router import api_keys
from kvxfer.router.api_keys import watch_api_keys
from tests.control_plane import RunningControlPlane, worker

from .servers import RunningRouter

RIGHT, WRONG = "0123456789abcdef0123", "not-the-one-of-alice"
REFUSED = [
    ("POST", "/v1/completions", {"model": "llama", "prompt": "hi"}),
    ("POST", "/v1/chat/completions", {"model": "llama", "messages": []}),
    ("GET", "/v1/models", None),
]


async def test_wrong_keys_are_answered_at_a_rate_and_right_ones_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FAILURES_PER_SECOND", 0.01)
    keys = tmp_path / "keys"
    keys.write_text(f"alice {RIGHT}\n")
    with (
        RunningControlPlane(lease_seconds=600) as control_plane,
        RunningRouter(control_plane.url, api_keys=watch_api_keys(keys)) as router,
    ):
        async with ControlPlaneClient(control_plane.url) as registering:
            await registering.register(worker("p"), state=InstanceState.READY)
        async with httpx.AsyncClient(base_url=router.url) as client:

            async def ask(method: str, path: str, body: object, key: str) -> httpx.Response:
                headers = {"Authorization": f"Bearer {key}"}
                return await client.request(method, path, json=body, headers=headers)

            for number in range(FAILURE_BURST):
                answer = await ask("GET", "/v1/models", None, f"{WRONG}-{number}")
                assert answer.status_code == 401
            for refused in REFUSED:
                answer = await ask(*refused, WRONG)
                assert answer.status_code == 429
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert "the address 127.0.0.1" in answer.json()["error"]["message"]
                assert 0 < int(answer.headers["retry-after"]) <= 100
            answer = await ask("GET", "/v1/models", None, RIGHT)
            assert [model["id"] for model in answer.json()["data"]] == ["llama"]
            answer = await client.get("/v1/models")
            assert answer.status_code == 401, "who shows no key guesses none"
