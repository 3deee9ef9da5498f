"""The load of a vLLM instance, from its scheduler and from its API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import httpx2
import pytest

from kvxfer.connectors import transfer_engine
from kvxfer.connectors.api_watch import ApiWatch, quantile
from kvxfer.connectors.vllm.load import RequestCounter
from kvxfer.connectors.vllm.plan import Counted
from kvxfer.connectors.vllm.scheduler import Scheduled
from tests.virtual_time import VirtualClock, passes


def scheduled(request_id: str, computed: int, tokens: int) -> Scheduled:
    return Scheduled(request_id, (), computed, tokens)


def test_requests_are_counted_from_their_arrival_to_their_end() -> None:
    free = [10]
    counter = RequestCounter()
    counter.bind(lambda: (free[0], 8))
    assert not counter.told, "nothing was told yet"
    assert counter.step((), ()) == Counted(free_blocks=10, cached_blocks=8)
    assert counter.told
    counter.arrived("a", 100)
    counter.arrived("b", 20)
    assert not counter.told
    free[0] = 3
    # This is the first of two chunks of a's prompt; b waits.
    told = counter.step([scheduled("a", 0, 60)], ())
    assert told == Counted(1, 1, 3, 8, requests=2, prompt_tokens=120, output_tokens=0)
    told = counter.step([scheduled("a", 60, 40), scheduled("b", 0, 20)], ())
    assert (told.running, told.waiting, told.output_tokens) == (2, 0, 2)
    told = counter.step([scheduled("a", 100, 1)], ("b",))
    assert (told.running, told.waiting, told.output_tokens) == (1, 1, 3)
    for request_id in ("a", "b"):
        counter.ended(request_id)
    free[0] = 10
    assert not counter.told
    told = counter.step((), ())
    assert (told.running, told.waiting, told.free_blocks) == (0, 0, 10)
    assert counter.told


def test_a_request_that_ends_before_its_prompt_is_computed_does_not_count() -> None:
    counter = RequestCounter()
    for name in ("refused", "left", "computed"):
        counter.arrived(name, 100)
    counter.step([scheduled("left", 0, 60), scheduled("computed", 0, 100)], ())
    for name in ("refused", "left", "computed"):
        counter.ended(name)
    told = counter.step((), ())
    assert (told.requests, told.prompt_tokens) == (1, 100)


@pytest.mark.parametrize(
    ("histogram", "expected"),
    [
        ({}, None),
        ({0.1: 0, float("inf"): 0}, None),
        ({0.1: 10, float("inf"): 10}, 0.09),
        ({0.1: 80, 0.2: 100, float("inf"): 100}, 0.15),
        ({0.1: 0, 0.2: 0, float("inf"): 5}, 0.2),  # beyond the last bound
    ],
)
def test_quantiles_are_computed_as_prometheus_does(
    histogram: dict[float, float], expected: float | None
) -> None:
    found = quantile(0.9, histogram)
    assert found == (None if expected is None else pytest.approx(expected))


class Api:
    """vLLM's HTTP API, as far as it is watched."""

    def __init__(self) -> None:
        self.observed: dict[str, list[float]] = {
            "time_to_first_token": [],
            "inter_token_latency": [],
        }
        self.models: list[str] = ["tiny", "alias"]
        self.status = 200

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            listed = {"data": [{"id": name, "object": "model"} for name in self.models]}
            return httpx2.Response(self.status, json=listed)
        lines = []
        for name, values in self.observed.items():
            for bound in (0.1, 0.2, 0.4, float("inf")):
                count = sum(value <= bound for value in values)
                le = "+Inf" if bound == float("inf") else str(bound)
                labels = f'engine="0",le="{le}",model_name="tiny"'
                lines.append(f"vllm:{name}_seconds_bucket{{{labels}}} {float(count)}")
        return httpx2.Response(200, text="\n".join(lines))


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
async def watch(api: Api, clock: VirtualClock) -> ApiWatch:
    return ApiWatch(
        "http://worker", "tiny", engine="vllm", clock=clock, transport=httpx2.MockTransport(api)
    )


async def test_latencies_are_those_of_the_last_minute(api: Api, watch: ApiWatch) -> None:
    await watch.look()
    assert (watch.ttft_p90, watch.itl_p90) == (None, None)
    api.observed["time_to_first_token"] += [0.15] * 10
    await passes(5)
    await watch.look()
    assert watch.ttft_p90 == pytest.approx(0.19)
    assert watch.itl_p90 is None
    for _ in range(13):
        await passes(5)
        await watch.look()
    assert watch.ttft_p90 is None, "that was more than a minute ago"


async def test_models_come_and_go_and_a_missing_key_is_logged_once(
    api: Api, watch: ApiWatch, caplog: pytest.LogCaptureFixture
) -> None:
    await watch.look()
    assert watch.models == ("alias",)
    api.models.append("sql")
    await watch.look()
    assert watch.models == ("alias", "sql")
    api.models.remove("sql")
    await watch.look()
    assert watch.models == ("alias",)
    api.status = 401
    await watch.look()
    await watch.look()
    assert watch.models == ("alias",)
    assert [line for line in caplog.messages if "set VLLM_API_KEY" in line] == [caplog.messages[0]]


async def test_an_api_that_does_not_answer_is_asked_again(watch: ApiWatch, api: Api) -> None:
    watch._http = httpx2.AsyncClient(base_url="http://w", transport=httpx2.MockTransport(away))
    with pytest.raises(httpx2.ConnectError):
        await watch.look()
    watch._http = httpx2.AsyncClient(base_url="http://w", transport=httpx2.MockTransport(api))
    await watch.look()
    assert watch.models == ("alias",)


def away(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("All connection attempts failed", request=request)


async def test_an_api_that_does_not_answer_for_a_minute_is_logged_once(
    watch: ApiWatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch._http = httpx2.AsyncClient(base_url="http://w", transport=httpx2.MockTransport(away))
    running = asyncio.create_task(watch.run())
    await passes(50)
    assert caplog.messages == []
    await passes(600)
    [told] = caplog.messages
    assert "its API at http://w does not answer" in told
    running.cancel()


async def test_each_reason_why_an_instance_is_not_ready_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Callable[[httpx2.Request], httpx2.Response]] = [away]
    client = partial(
        httpx2.AsyncClient, transport=httpx2.MockTransport(lambda request: answers[-1](request))
    )
    monkeypatch.setattr(httpx2, "AsyncClient", client)
    waiting = asyncio.create_task(
        transfer_engine._until_it_answers("p", "http://10.0.0.9:1", lambda: False)
    )
    await passes(29)
    assert caplog.messages == []
    await passes(300)
    answers.append(lambda _: httpx2.Response(404))
    await passes(300)
    answers.append(lambda _: httpx2.Response(200))
    await waiting
    unreachable, wrong = caplog.messages
    for told in (unreachable, wrong):
        assert told.startswith("instance p is not ready and gets no requests: http://10.0.0.9:1/")
    assert "All connection attempts failed" in unreachable
    assert "/health answers 404" in wrong
