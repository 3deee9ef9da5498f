"""One request at both workers of a pair: what they answer, and which of them to blame."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Self, TypeAlias

import httpx2
import msgspec

from kvxfer.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    LeaseExpired,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransferCancelled,
    TransferError,
    TransferRefused,
    by_code,
)
from kvxfer.event_stream import EventParser
from kvxfer.router.settings import Handshake
from kvxfer.tracing.span import HEADER, Span, child, span
from kvxfer.transfers import OpenedTransfer, Party
from kvxfer.unreadable import UNREADABLE

Chunk: TypeAlias = dict[str, Any]
"""A JSON object of OpenAI's API: an event of a stream, or a completion."""

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

# Prefill computes the prompt and one token, once.
_NOT_FOR_PREFILL: Final = frozenset(
    {"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of"}
)
# What a worker says when the other one, or the way to it, has failed.
_OF_THE_OTHER: Final = (
    ChecksumMismatch,
    PeerError,
    TransferCancelled,
    TransferRefused,
    LeaseExpired,
    DeadlineExceeded,
)
# SGLang's rooms are signed integers of 64 bits.
_ROOM_BITS: Final = 63
# Decode has the whole cache by then; prefill's answer is on its way.
_PREFILL_SECONDS: Final = 1.0


class WorkerFailed(Exception):
    """A worker failed with `error`; `instance_id` is the one that a next attempt should avoid."""

    def __init__(self, error: KvxferError, instance_id: str) -> None:
        super().__init__(str(error))
        self.error, self.instance_id = error, instance_id

    @property
    def code(self) -> str:
        return self.error.code


class Exchange:
    """A request that both workers of a transfer work on. Loop only; use it inside `async with`.

    begin() sends it, chunks() reads decode's stream. Leaving gives up whatever is still under way,
    at both: a worker whose connection is closed drops the request.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        transfer: OpenedTransfer,
        body: Mapping[str, Any],
        *,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        handshake: Handshake = "direct",
        token_seconds: float | None = None,
    ) -> None:
        self._http = http
        self._transfer = transfer
        self._path = path
        own = {"X-Request-ID": transfer.request_id, "Content-Type": "application/json"}
        self._headers = {**(headers or {}), **own}
        self._meeting = _meeting(transfer, handshake)
        self._body = {**body, **self._meeting}
        self._token_seconds = token_seconds
        self._responses: list[httpx2.Response] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._parser = EventParser()
        self._events: collections.deque[str] = collections.deque()
        self._decode_span: Span | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if self._decode_span is not None:
            self._decode_span.end(error)
        if kind is None and self._tasks:
            await asyncio.wait(self._tasks, timeout=_PREFILL_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for response in self._responses:
            await response.aclose()

    async def begin(self, seconds: float | None = None) -> None:
        """Sends the request to both, and returns with decode's first token.

        Raises WorkerFailed, or DeadlineExceeded where there is no token within `seconds`.
        """
        self._prefill = asyncio.create_task(self._ask_prefill())
        decode = asyncio.create_task(self._ask_decode())
        self._tasks = [self._prefill, decode]
        try:
            async with asyncio.timeout(seconds):
                waiting = set(self._tasks)
                while not decode.done():
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if not (decode.done() and decode.exception() is None):
                        _raise_the_cause(done)
        except TimeoutError:
            raise DeadlineExceeded(f"there was no token within {seconds:.3g} s") from None
        self._first = decode.result()

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Decode's stream from its first token to its usage. Each is read when it is asked for.

        Raises WorkerFailed.
        """
        chunk: Chunk | None = self._first
        while chunk is not None:
            yield chunk
            try:
                async with asyncio.timeout(self._token_seconds):
                    chunk = await self._next_chunk()
            except TimeoutError:
                decode = self._transfer.decode
                raise WorkerFailed(
                    PeerTimeout(
                        f"decode worker {decode.instance_id!r} at {decode.http_address} has sent "
                        f"no token for {self._token_seconds:g} s"
                    ),
                    decode.instance_id,
                ) from None

    async def prefill_answer(self) -> bytes:
        """The body of prefill's answer. Raises WorkerFailed."""
        return await self._prefill

    async def _ask_prefill(self) -> bytes:
        party = self._transfer.prefill
        body = {name: value for name, value in self._body.items() if name not in _NOT_FOR_PREFILL}
        with span("prefill", instance_id=party.instance_id) as asked:
            response = await self._post(party, {**body, "max_tokens": 1, "stream": False}, asked)
            return await self._read(party, response)

    async def _ask_decode(self) -> Chunk:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**self._body, **streamed}
        if params := self._meeting.get("kv_transfer_params"):
            # vLLM then tells its connector of a request that its API refuses, and prefill lets go.
            body["kv_transfer_params"] = {**params, "do_remote_prefill": True}
        party = self._transfer.decode
        self._decode_span = asked = child("decode", instance_id=party.instance_id)
        response = await self._post(party, body, asked)
        self._bytes: AsyncIterator[bytes] = response.aiter_bytes()
        chunk = await self._next_chunk()
        if chunk is None:
            raise _unreadable(party, "without a single token")
        if asked is not None:
            asked.event("first token")
        return chunk

    async def _post(
        self, party: Party, body: Mapping[str, Any], asked: Span | None
    ) -> httpx2.Response:
        traced = {} if asked is None else {HEADER: asked.traceparent}
        request = self._http.build_request(
            "POST",
            party.http_address + self._path,
            content=json.dumps(body).encode(),
            headers={**self._headers, **traced},
        )
        try:
            response = await self._http.send(request, stream=True)
        except httpx2.RequestError as error:
            raise _lost(party, error) from error
        self._responses.append(response)
        if not response.is_success:
            raise self._said(party, _problem(party, response, await self._read(party, response)))
        return response

    async def _read(self, party: Party, response: httpx2.Response) -> bytes:
        try:
            return await response.aread()
        except httpx2.RequestError as error:
            raise _lost(party, error) from error

    async def _next_chunk(self) -> Chunk | None:
        party = self._transfer.decode
        while not self._events:
            try:
                content = await anext(self._bytes)
            except (httpx2.RequestError, StopAsyncIteration) as error:
                raise _lost(party, error) from error
            try:
                self._events.extend(event.data for event in self._parser.feed(content))
            except ProtocolError as error:
                raise _unreadable(party, f"that is none ({error})") from error
        data = self._events.popleft()
        if data == "[DONE]":
            # Only a connection whose answer is read to its end can be used again.
            with contextlib.suppress(httpx2.RequestError):
                async for _ in self._bytes:
                    pass
            return None
        try:
            chunk = msgspec.json.decode(data, type=dict[str, Any])
        except UNREADABLE as error:
            raise _unreadable(party, f"with an event that is no JSON object ({error})") from error
        if isinstance(problem := chunk.get("error"), Mapping):
            code, detail = str(problem.get("code")), str(problem.get("message"))
            raise self._said(party, _error(code, detail))
        return chunk

    def _said(self, party: Party, error: KvxferError) -> WorkerFailed:
        """What comes of an error that `party` tells of."""
        pair = self._transfer
        other = pair.prefill if party is pair.decode else pair.decode
        blamed = other if isinstance(error, _OF_THE_OTHER) else party
        return WorkerFailed(error, blamed.instance_id)


def _meeting(transfer: OpenedTransfer, handshake: Handshake) -> dict[str, Any]:
    """What tells the two workers of a request of each other."""
    if transfer.prefill.bootstrap_address:
        host, _, port = transfer.prefill.bootstrap_address.rpartition(":")
        room = secrets.randbits(_ROOM_BITS)
        return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}
    params: dict[str, Any] = {
        "ticket": transfer.ticket,
        "prefill_engine_address": transfer.prefill.engine_address,
    }
    if transfer.prefill.rank_addresses:
        params["prefill_rank_addresses"] = list(transfer.prefill.rank_addresses)
    if handshake == "brokered":
        params["handshake"] = handshake
        params["decode_engine_address"] = transfer.decode.engine_address
    return {"kv_transfer_params": params}


def _raise_the_cause(done: set[asyncio.Task[Any]]) -> None:
    """Raises what failed rather than how the other side took it."""
    failed = [error for task in done if (error := task.exception()) is not None]
    if failed:
        raise min(
            failed,
            key=lambda failure: isinstance(getattr(failure, "error", None), TransferCancelled),
        )


def _lost(party: Party, error: Exception) -> WorkerFailed:
    cause = str(error) or type(error).__name__
    if isinstance(error, StopAsyncIteration):
        cause = "its stream ends before it is done"
    lost = PeerLost(f"the worker at {party.http_address} does not answer ({cause})")
    return WorkerFailed(lost, party.instance_id)


def _unreadable(party: Party, how: str) -> WorkerFailed:
    error = ProtocolError(f"the worker at {party.http_address} sent a stream {how}")
    return WorkerFailed(error, party.instance_id)


def _problem(party: Party, response: httpx2.Response, content: bytes) -> KvxferError:
    """The error that a worker's problem document names, or one of OpenAI's shape (vLLM)."""
    try:
        problem = msgspec.json.decode(content, type=dict[str, Any])
        if isinstance(error := problem.get("error"), Mapping):
            refused = response.status_code == HTTPStatus.BAD_REQUEST
            return (InvalidArgument if refused else TransferError)(str(error["message"]))
        code, detail = str(problem["code"]), str(problem["detail"])
    except (*UNREADABLE, KeyError):
        return TransferError(
            f"the worker at {party.http_address} answered HTTP {response.status_code} without a "
            "problem document"
        )
    return _error(code, detail)


def _error(code: str, detail: str) -> KvxferError:
    kind = by_code(code)
    if kind is KvxferError or kind is LayoutMismatch:
        return TransferError(f"{detail} [{code}]")
    return kind(detail)
