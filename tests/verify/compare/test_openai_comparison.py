"""The comparison of `make test SUITE=openai` notes differences, by push and by pull."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import httpx2
import pytest

from verify.compare.openai.answers import Where, read
from verify.compare.openai.cases import Case
from verify.compare.openai.comparison import (
    BROKEN_OFF,
    ServerLost,
    Tally,
    Way,
    can_be_pulled,
    compare,
    pulled,
    straight,
)
from verify.compare.openai.members import CHAT, COMPLETIONS, ROUTES

from .openai_answers import (
    DONE,
    ERROR,
    MESSAGES,
    OF_USAGE,
    REFUSED,
    RESPONSES,
    found,
    piece,
    streamed,
    whole,
)

# Requests, and their outcomes.


def answering(*answers: httpx2.Response) -> Way:
    """Returns a server with these answers, one after the other."""
    left = iter(answers)

    async def ask(http: httpx2.AsyncClient, case: Case, body: Any) -> httpx2.Response:
        return next(left)

    return ask


def completion(text: str, **more: Any) -> httpx2.Response:
    return whole({"id": "cmpl-5a1f", "choices": [piece(text)], **more})


BOTH: Final = (completion("a"), completion("b"))
ASKED: Final = Case("n", COMPLETIONS, ({"n": 1}, {"n": 2}))


async def test_answers_that_are_equal_are_counted_and_returned() -> None:
    tally, advanced = Tally(), list[str]()
    theirs = [completion("a"), whole({"error": ERROR}, 400), completion("c")]
    cases = [ASKED, Case("last", COMPLETIONS, (b"{",))]
    ways = {"push": answering(*theirs), "itself": answering(*theirs)}
    told = await compare(
        *(cases, answering(*theirs), ways, [], tally), lambda: advanced.append("a case")
    )
    assert told == [[read(theirs[0]), read(theirs[1])], [read(theirs[2])]]
    assert tally == Tally(compared=tally.compared, answered=2)
    assert tally.compared == {"push": 3, "itself": 3}
    assert advanced == ["a case"] * 2


async def test_an_answer_that_differs_is_noted_with_its_request() -> None:
    tally = Tally()
    theirs = answering(completion("a"), completion("b"))
    ways = {"push": answering(completion("a"), completion("c")), "pull": answering(*BOTH)}
    told = await compare([ASKED], theirs, ways, [], tally)
    assert told == [list(map(read, BOTH))]
    assert tally.compared == {"push": 2, "pull": 2}
    [different] = tally.different
    assert (different.way, different.case, different.body) == ("push", ASKED, {"n": 2})
    assert different.where == [Where(("choices", "0", "text"), "'c', not 'b'")]
    assert different.told() == (
        "push POST /v1/completions: n\n  asked {\"n\": 2}\n  choices.0.text: 'c', not 'b'\n"
    )


@pytest.mark.parametrize(("way", "excused"), [("push", 1), ("pull", 0), ("itself", 0)])
async def test_only_answers_by_push_are_excused(way: str, excused: int) -> None:
    tally = Tally()
    theirs = answering(*[completion("a", usage={"completion_tokens": 3})] * 2)
    ours = answering(*[completion("a", usage={"completion_tokens": 4})] * 2)
    await compare([ASKED], theirs, {way: ours}, [REFUSED, OF_USAGE], tally)
    assert tally.excused == ({OF_USAGE: 1} if excused else {})
    assert [each.body for each in tally.different] == [{"n": 1}, {"n": 2}][: 2 - excused]


CACHED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    COMPLETIONS: ("usage", {"prompt_tokens_details": {"cached_tokens": 3}}),
    RESPONSES: ("usage", {"input_tokens_details": {"cached_tokens": 3}, "input_tokens": 9}),
    MESSAGES: ("usage", {"cache_read_input_tokens": 3, "input_tokens": 9}),
}


@pytest.mark.parametrize("route", CACHED)
async def test_by_pull_the_cached_tokens_of_a_prompt_do_not_count(route: str) -> None:
    name, cached = CACHED[route]
    others = json.loads(json.dumps(cached).replace("3", "8"))
    if "cache_read_input_tokens" in cached:
        others["input_tokens"] = 4
    case, tally = Case("cached", route, ({},)), Tally()
    theirs = whole({name: {**cached, "output_tokens": 2}})
    ours = whole({name: {**others, "output_tokens": 2}})
    for way in ("pull", "push"):
        await compare([case], answering(theirs), {way: answering(ours)}, [], tally)
    assert [each.way for each in tally.different] == ["push"]
    wrongs = [{**others, "output_tokens": 1}, {**others, "output_tokens": 2, "more": 1}]
    if route == RESPONSES:
        wrongs.append({**others, "output_tokens": 2, "input_tokens": 8})
    for wrong in wrongs:
        tally = Tally()
        ways = {"pull": answering(whole({name: wrong}))}
        await compare([case], answering(theirs), ways, [], tally)
        assert len(tally.different) == 1


async def test_by_pull_refusals_are_not_compared() -> None:
    tally = Tally()
    lost = streamed({"error": ERROR}, DONE)
    theirs = answering(whole({"error": ERROR}, 400), lost)
    await compare([ASKED], theirs, {"pull": answering(*BOTH)}, [], tally)
    assert tally == Tally(answered=1)
    refused = answering(whole({"error": ERROR}, 400), lost)
    await compare([ASKED], answering(*BOTH), {"pull": refused}, [], tally)
    assert len(tally.different) == tally.compared["pull"] == 2


def served(handler: Callable[[httpx2.Request], httpx2.Response]) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.MockTransport(handler))


async def test_a_pull_asks_prefill_for_one_token_and_decode_with_its_reply() -> None:
    asked: list[tuple[str, Any]] = []

    def reply(request: httpx2.Request) -> httpx2.Response:
        asked.append((str(request.url), json.loads(request.content)))
        return whole({"kv_transfer_params": {"remote_host": "prefill"}})

    body = {"prompt": "a", "max_tokens": 6, "min_tokens": 2, "n": 2, "stream": True, "top_k": 5}
    async with served(reply) as http:
        await pulled("http://p", "http://d")(http, Case("a", COMPLETIONS, (body,)), body)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    assert asked == [
        (
            "http://p/v1/completions",
            {"prompt": "a", "max_tokens": 1, "top_k": 5, "kv_transfer_params": params},
        ),
        (
            "http://d/v1/completions",
            {**body, "kv_transfer_params": {"remote_host": "prefill"}},
        ),
    ]


async def test_a_refusal_of_prefill_is_the_answer_of_a_pull() -> None:
    def reply(request: httpx2.Request) -> httpx2.Response:
        assert request.url.host == "p"
        return whole({"error": ERROR}, 400)

    async with served(reply) as http:
        answer = await pulled("http://p", "http://d")(http, ASKED, {"n": 2})
    assert found(answer, whole({"error": ERROR}, 400)) == []


def test_only_objects_for_a_route_with_a_limit_are_pulled() -> None:
    assert all(can_be_pulled(Case("", route, ({},))) for route in (*ROUTES, RESPONSES, MESSAGES))
    assert not can_be_pulled(Case("", "/tokenize", ({},)))
    assert not can_be_pulled(Case("", CHAT, ({}, b"{")))


async def test_an_answer_that_breaks_off_gets_a_status_that_no_server_sends() -> None:
    def breaks_off(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.RemoteProtocolError("the server disconnected")

    def lost(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    async with served(breaks_off) as http:
        answer = await straight("http://s")(http, ASKED, {"n": 2})
    assert (answer.status_code, answer.text) == (BROKEN_OFF, "the server disconnected")
    async with served(lost) as http:
        with pytest.raises(ServerLost) as raised:
            await straight("http://s")(http, ASKED, {"n": 2})
    assert str(raised.value) == (
        "the server at http://s does not answer (refused); "
        "it was asked at /v1/completions, n: b'{\"n\": 2}'"
    )


async def test_a_request_is_sent_as_it_is_written() -> None:
    asked: list[httpx2.Request] = []

    def reply(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return whole({})

    case = Case("", CHAT, (b"{",), method="PUT", headers={"Content-Type": "text/plain"})
    async with served(reply) as http:
        await straight("http://s")(http, case, b"{")
    [request] = asked
    assert (request.method, str(request.url)) == ("PUT", "http://s/v1/chat/completions")
    assert request.content == b"{"
    assert request.headers["content-type"] == "text/plain"
