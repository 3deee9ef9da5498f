"""Sends requests to the aggregated server and to the pair, and compares the answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from verify.compare.openai.answers import Answer, Where, read
from verify.compare.openai.by_hand import MESSAGES, RESPONSES
from verify.compare.openai.cases import Case
from verify.compare.openai.excuses import Excuse, excusing
from verify.compare.openai.members import CHAT, COMPLETIONS

_SECONDS: Final = 120.0
_LIMITS: Final = {
    COMPLETIONS: "max_tokens",
    CHAT: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}

BROKEN_OFF: Final = 599
"""The status of an answer that breaks off: vLLM itself closes the connection of some requests."""


class ServerLost(Exception):
    """A server has ended. The text names its last request."""


Way = Callable[[httpx2.AsyncClient, Case, Any], Awaitable[httpx2.Response]]
"""A way by which a request gets to a server."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the aggregated server's."""

    way: str
    case: Case
    body: Any
    where: Sequence[Where]
    theirs: Answer
    """The aggregated server's answer."""
    ours: Answer

    def told(self) -> str:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body)
        return (
            f"{self.way} {self.case.method} {self.case.route}: {self.case.name}\n"
            f"  asked {body!s:.600}\n" + "".join(f"  {each!s:.300}\n" for each in self.where[:6])
        )


@dataclass
class Tally:
    """The results of the comparison so far."""

    compared: Counter[str] = field(default_factory=Counter)
    """The number of compared requests, by way."""
    answered: int = 0
    """The number of requests that the aggregated server did not refuse."""
    excused: Counter[Excuse] = field(default_factory=Counter)
    different: list[Difference] = field(default_factory=list)


def straight(url: str) -> Way:
    """Returns the way to one server, which does all of the work."""

    async def ask(http: httpx2.AsyncClient, case: Case, body: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **case.headers}
        try:
            return await http.request(
                case.method, url + case.route, content=content, headers=headers
            )
        except httpx2.RemoteProtocolError as error:
            return httpx2.Response(BROKEN_OFF, text=str(error))
        except httpx2.TransportError as error:
            cause = str(error) or type(error).__name__
            raise ServerLost(
                f"the server at {url} does not answer ({cause}); it was asked at {case.route}, "
                f"{case.name}: {content!r:.1000}"
            ) from error

    return ask


def pulled(prefill: str, decode: str) -> Way:
    """Returns the way of vLLM's own proxies: first prefill, then decode with the parameters in
    prefill's reply."""

    async def ask(http: httpx2.AsyncClient, case: Case, body: Any) -> httpx2.Response:
        first = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        for name in ("max_completion_tokens", "min_tokens", "n", "best_of"):
            first.pop(name, None)
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first |= {_LIMITS[case.route]: 1, "kv_transfer_params": asked}
        reply = await straight(prefill)(http, case, first)
        if not reply.is_success:
            return reply
        params = reply.json().get("kv_transfer_params")
        return await straight(decode)(http, case, {**body, "kv_transfer_params": params})

    return ask


def can_be_pulled(case: Case) -> bool:
    return case.route in _LIMITS and all(isinstance(body, dict) for body in case.bodies)


async def compare(
    cases: Sequence[Case],
    reference: Way,
    ways: dict[str, Way],
    excuses: Sequence[Excuse],
    tally: Tally,
    advance: Callable[[], None] = lambda: None,
) -> list[list[Answer]]:
    """Compares all cases. Returns the reference's answers, a list for each case.

    Sends one request after the other: the last digits of an engine's results, and its choice among
    equal logits, depend on the other requests in a batch.
    """
    found = []
    # vLLM closes a connection after an internal error; the next request could still use it.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=_SECONDS, limits=limits, trust_env=False) as http:
        for case in cases:
            told = []
            for body in case.bodies:
                asked = [reference, *ways.values()]
                answers = await asyncio.gather(*(way(http, case, body) for way in asked))
                theirs, *others = map(read, answers)
                for way, ours in zip(ways, others, strict=True):
                    _note(tally, excuses, Difference(way, case, body, (), theirs, ours))
                tally.answered += theirs.status == 200
                told.append(theirs)
            found.append(told)
            advance()
    return found


def _note(tally: Tally, excuses: Sequence[Excuse], seen: Difference) -> None:
    way, theirs, ours = seen.way, seen.theirs, seen.ours
    if way == "pull":
        if theirs.status != 200 or is_error(theirs):
            return  # errors of a proxy are not compared
        theirs, ours = without_usage_of_prompt(theirs), without_usage_of_prompt(ours)
    tally.compared[way] += 1
    where = ours.differences(theirs)
    if not where:
        return
    excuse = excusing(excuses, seen.case, seen.body, where) if way == "push" else None
    if excuse is not None:
        tally.excused[excuse] += 1
    else:
        tally.different.append(Difference(way, seen.case, seen.body, where, theirs, ours))


def is_error(answer: Answer) -> bool:
    """Returns whether a stream reports an error."""
    content = answer.content
    if not isinstance(content, dict):
        return False
    told = [*content.get("others", ()), *(data for _, data in content.get("events", ()))]
    return any(isinstance(each, dict) and "error" in each for each in told)


def without_usage_of_prompt(answer: Answer) -> Answer:
    """Removes the usage of the prompt. Clients of vLLM's own proxies get decode's usage, with other
    cached tokens."""
    return Answer(answer.status, answer.headers, _without(answer.content))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        told = {
            *("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"),
            "cache_creation_input_tokens",
        }
        if "cache_read_input_tokens" in value:
            told.add("input_tokens")
        return {name: _without(each) for name, each in value.items() if name not in told}
    return [_without(each) for each in value] if isinstance(value, list) else value
