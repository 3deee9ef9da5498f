"""One request at the workers of a transfer: what they answer, and which of them to blame."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import httpx2
import msgspec

from kvxfer.errors import (
    ChecksumMismatch,
    ConnectFailed,
    DeadlineExceeded,
    KvxferError,
    LeaseExpired,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    TransferCancelled,
    TransferRefused,
    WorkerError,
)
from kvxfer.router.asked import Asked
from kvxfer.router.bodies import Members, as_raw
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.continuation import Continuation
from kvxfer.router.downstream import Downstream
from kvxfer.router.event_bytes import EventBytes, data_of, events_in, with_data
from kvxfer.router.output_lengths import tokens_told
from kvxfer.router.settings import RouterSettings
from kvxfer.router.transcript import Transcript
from kvxfer.router.worker_errors import error_event, error_of, is_refusal
from kvxfer.tracing.span import HEADER, Span, child, span
from kvxfer.transfers import OpenedTransfer, Party
from kvxfer.unreadable import UNREADABLE
from kvxfer.web.wait_limit import WaitLimit

JsonObject = dict[str, Any]

# Errors that a worker reports when the other one, or the network to it, has failed.
_OF_THE_OTHER: Final = (
    ChecksumMismatch,
    PeerError,
    TransferCancelled,
    TransferRefused,
    LeaseExpired,
    DeadlineExceeded,
)
# Headers of a connection, or headers that the router's own server sets.
_NOT_PASSED: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "date", "server", "vary", "x-request-id"),
    }
)
_EVENTS: Final = "text/event-stream"
# SGLang's rooms are signed integers of 64 bits.
_ROOM_BITS: Final = 63
# The longest wait for prefill's answer when decode has the whole cache.
_PREFILL_SECONDS: Final = 5.0
# The longest wait for decode to refuse, in its own words, what prefill has refused.
_REFUSAL_SECONDS: Final = 1.0
# The longest wait for GET /health of a silent worker: an answer in one piece shows no activity.
_HEALTH_SECONDS: Final = 5.0
# No text of an answer contains it: quotes are escaped there.
_ERROR: Final = b'{"error"'


class WorkerFailed(Exception):
    """A worker failed with `error`; `instance_id` is the one that a next attempt should avoid."""

    def __init__(self, error: KvxferError, instance_id: str) -> None:
        super().__init__(str(error))
        self.error, self.instance_id = error, instance_id


class NotByPair(Exception):
    """A pair of this model cannot compute the request, because of the member that is the argument:
    one worker must serve it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer in one piece."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class _Stream(NamedTuple):
    """A worker's stream from its first event on."""

    response: httpx2.Response
    parts: AsyncIterator[bytes]
    first: bytes


class Exchange:
    """A request at both workers of a pair, or at one worker alone. Loop only; use it inside
    `async with`.

    begin() sends it, pass_on() sends the answer to the client. The end of the block gives up what
    is still under way: a worker whose connection is closed drops the request.
    """

    def __init__(
        self,
        http: WorkerConnections,
        transfer: OpenedTransfer,
        asked: Asked,
        settings: RouterSettings,
        *,
        last: bool = False,
        transcript: Transcript | None = None,
        continuation: Continuation | None = None,
        inter_token: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Sends nothing yet.

        `last`: no attempt follows, so a stream that begins with the worker's error is the client's
        answer. `transcript`: of a stream that may go on at another worker. `continuation`: of a
        stream that goes on here. `inter_token` gets the seconds between two parts of a stream.
        """
        self._http = http
        self._transfer = transfer
        self._asked = asked
        self._settings = settings
        self._transcript = transcript
        self._continuation = continuation
        self._inter_token = inter_token
        own = {
            "X-Request-ID": transfer.request_id,
            "Content-Type": asked.content_type,
            "Accept-Encoding": "identity",
        }
        self._headers = {**asked.headers, **settings.headers_for_workers(), **own}
        self._paired = not asked.alone
        self._takes_logprobs = (
            self._paired and not asked.streams and asked.dialect.prompt_logprobs(asked.members)
        )
        self._room = secrets.randbits(_ROOM_BITS)
        self._passes_errors = last
        self._events = EventBytes()
        self._responses: list[httpx2.Response] = []
        self._tasks: list[asyncio.Task[Any]] = []  # prefill's, decode's
        self._prefill: asyncio.Task[bytes] | None = None
        self._decode: asyncio.Task[Answer | _Stream]
        self._decode_span: Span | None = None
        self.output_tokens = 0
        """The tokens of a complete answer by its usage; without one, the events of a stream."""
        self.stream_error: KvxferError | None = None
        """The error that the worker reported in the middle of its stream; the client got it too."""

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

    async def begin(self, client: Downstream | None = None, seconds: float | None = None) -> None:
        """Sends the request. Returns at the first event of a stream; for an answer in one piece,
        when prefill has computed the prompt, or at once without a prefill worker.

        Comments before the first event go to the `client`. Raises WorkerFailed, NotByPair, or
        DeadlineExceeded after `seconds`.
        """
        if self._paired:
            self._prefill = asyncio.create_task(self._ask_prefill())
            self._tasks.append(self._prefill)
        self._decode = asyncio.create_task(self._ask_decode(client))
        self._tasks.append(self._decode)
        if not self._paired and not self._asked.streams:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._until_begun()
        except TimeoutError:
            raise DeadlineExceeded(f"there was no token within {seconds:.3g} s") from None

    async def pass_on(self, client: Downstream) -> None:
        """Sends the answer to the client, each part as it arrives, so a slow client slows decode
        down. Raises WorkerFailed, also in the middle of a stream."""
        answer = await self._decoded()
        if isinstance(answer, _Stream):
            await self._pass_stream(client, answer)
        else:
            content = await self._completed(answer.content)
            self.output_tokens = tokens_told(content)
            await client.answer(answer.status, answer.headers, content)

    async def answers(self) -> tuple[bytes, bytes]:
        """Returns the bodies of prefill's and decode's answer in one piece. Raises WorkerFailed."""
        answer = await self._decoded()
        if isinstance(answer, _Stream) or self._prefill is None:
            raise _unreadable(self._transfer.decode, "a stream instead of an answer in one piece")
        return await self._prefill, answer.content

    # --- what is asked ---------------------------------------------------------------------------

    async def _ask_prefill(self) -> bytes:
        party, dialect = self._transfer.prefill, self._asked.dialect
        left_out = {"stream", "stream_options", "stream_interval", *dialect.not_for_prefill}
        body: JsonObject = {
            name: value for name, value in self._asked.members.items() if name not in left_out
        }
        body |= {"stream": False, **self._meeting(**dialect.for_prefill)}
        if dialect.limit:
            body[dialect.limit] = 1
        with span("prefill", instance_id=party.instance_id) as asked:
            response = await self._send(party, msgspec.json.encode(body), asked)
            content = await self._read(party, response)
        if self._takes_logprobs:
            with contextlib.suppress(*UNREADABLE):
                # If layers keep a state, decode computes the last token of a prompt.
                if dialect.lacks_logprobs(msgspec.json.decode(content, type=JsonObject)):
                    raise NotByPair("prompt_logprobs")
        return content

    async def _ask_decode(self, client: Downstream | None) -> Answer | _Stream:
        party = self._transfer.decode
        self._decode_span = asked = child("decode", instance_id=party.instance_id)
        response = await self._send(party, self._for_decode(), asked)
        if not response.headers.get("content-type", "").startswith(_EVENTS):
            content = await self._read(party, response)
            return Answer(response.status_code, _passed(response), content)
        parts = response.aiter_raw()
        first = await self._first_events(response, parts, client)
        if asked is not None:
            asked.event("first token")
        return _Stream(response, parts, first)

    def _for_decode(self) -> bytes:
        body: Members = self._asked.members
        if self._transcript is not None:
            body = {**body, "return_token_ids": as_raw(True)}
        if not self._paired:
            known = body is self._asked.members
            return self._asked.content if known else msgspec.json.encode(body)
        if self._takes_logprobs:
            # vLLM would compute the prompt again, although prefill has.
            body = {name: value for name, value in body.items() if name != "prompt_logprobs"}
        # vLLM then reports a request that its API refuses to its connector: prefill frees blocks.
        return msgspec.json.encode({**body, **self._meeting(do_remote_prefill=True)})

    def _meeting(self, **side: bool) -> JsonObject:
        """Returns the members by which the two workers of a request find each other."""
        transfer = self._transfer
        if transfer.prefill.bootstrap_address:
            host, _, port = transfer.prefill.bootstrap_address.rpartition(":")
            where = {"bootstrap_host": host, "bootstrap_port": int(port)}
            return {**where, "bootstrap_room": self._room}
        params: JsonObject = {
            "ticket": transfer.ticket,
            "prefill_engine_address": transfer.prefill.engine_address,
            **side,
        }
        if transfer.prefill.rank_addresses:
            params["prefill_rank_addresses"] = list(transfer.prefill.rank_addresses)
        if self._settings.handshake == "brokered":
            params["handshake"] = "brokered"
            params["decode_engine_address"] = transfer.decode.engine_address
        if self._asked.rendered is not None:
            params["prompt_token_ids"] = self._asked.rendered
        return {"kv_transfer_params": params}

    async def _send(self, party: Party, content: bytes, asked: Span | None) -> httpx2.Response:
        if not party.http_address:
            raise _without_api(party)
        traced = {} if asked is None else {HEADER: asked.traceparent}
        url, headers = party.http_address + self._asked.path, {**self._headers, **traced}
        decode = party is self._transfer.decode
        try:
            response = await self._http.send(
                self._asked.method, url, headers, content, decode=decode
            )
        except httpx2.RequestError as error:
            raise _lost(party, error) from error
        self._responses.append(response)
        if not response.is_success:
            content = await self._read(party, response)
            said = error_of(party.http_address, response.status_code, content, _passed(response))
            raise self._said(party, said)
        return response

    async def _read(self, party: Party, response: httpx2.Response) -> bytes:
        try:
            return await response.aread()
        except httpx2.RequestError as error:
            raise _lost(party, error) from error

    # --- until the answer may begin --------------------------------------------------------------

    async def _until_begun(self) -> None:
        waiting = set(self._tasks)
        while not self._decode.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() is not None for task in done):
                await self._raise_the_cause()
            elif self._prefill is not None and self._prefill.done() and not self._asked.streams:
                return
        self._decode.result()

    async def _raise_the_cause(self) -> None:
        """Raises the cause, rather than the other side's reaction to it. Returns if decode has an
        answer nevertheless."""
        if not self._decode.done() and is_refusal(_said_by(self._tasks[0])):
            # Prefill's request differs from the client's: decode may accept what prefill refuses.
            await asyncio.wait({self._decode}, timeout=_REFUSAL_SECONDS)
        if self._decode.done() and self._decode.exception() is None:
            return
        failed = [task for task in reversed(self._tasks) if _failed(task)]
        cause = min(failed, key=lambda task: isinstance(_said_by(task), TransferCancelled))
        cause.result()

    async def _first_events(
        self, response: httpx2.Response, parts: AsyncIterator[bytes], client: Downstream | None
    ) -> bytes:
        """Returns what has arrived of a stream from its first event on. Raises WorkerFailed if that
        event is an error that another pair may not have."""
        party = self._transfer.decode
        while (whole := await self._next(parts)) is not None:
            at = 0
            for event in events_in(whole):
                if (data := data_of(event)) is not None:
                    self._check_first(party, data)
                    return whole[at:]
                at += len(event)
                if client is not None:
                    await client.begin(response.status_code, _passed_stream(response))
                    await client.comment(event)
        raise _lost(party, None)

    def _check_first(self, party: Party, data: bytes) -> None:
        if data == b"[DONE]":
            raise _unreadable(party, "a stream without a single token")
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except UNREADABLE as error:
            how = f"a stream with an event that is no JSON object ({error})"
            raise _unreadable(party, how) from error
        said = error_event(party.http_address, event, data)
        own = is_refusal(said) or (isinstance(said, WorkerError) and self._passes_errors)
        if said is not None and not own:
            raise self._said(party, said)

    async def _next(self, parts: AsyncIterator[bytes]) -> bytes | None:
        """Returns the events that decode's next bytes complete; None after the last bytes."""
        party = self._transfer.decode
        try:
            part = await anext(parts, None)
            return None if part is None else self._events.feed(part)
        except httpx2.RequestError as error:
            raise _lost(party, error) from error
        except ProtocolError as error:
            raise _unreadable(party, f"an invalid stream ({error})") from error

    # --- from then on ----------------------------------------------------------------------------

    async def _decoded(self) -> Answer | _Stream:
        """Returns decode's answer in one piece, or its stream."""
        settings, loop = self._settings, asyncio.get_running_loop()
        give_up = loop.time() + settings.answer_seconds
        while not self._decode.done():
            left = give_up - loop.time()
            if left <= 0:
                raise DeadlineExceeded(f"there was no answer within {settings.answer_seconds:g} s")
            await asyncio.wait({self._decode}, timeout=min(settings.token_seconds, left))
            if not self._decode.done():
                await self._require_alive(self._transfer.decode)
        return self._decode.result()

    async def _require_alive(self, party: Party) -> None:
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._http.get(party.http_address + "/health", self._headers)
        except (TimeoutError, httpx2.RequestError) as error:
            raise WorkerFailed(
                PeerTimeout(
                    f"worker {party.instance_id!r} at {party.http_address} computes an answer and "
                    f"does not answer GET /health within {_HEALTH_SECONDS:g} s"
                ),
                party.instance_id,
            ) from error

    async def _pass_stream(self, client: Downstream, stream: _Stream) -> None:
        party, dialect = self._transfer.decode, self._asked.dialect
        await client.begin(stream.response.status_code, _passed_stream(stream.response))
        # The prompt of a continuation is not the client's.
        with_usage = self._prefill is not None and self._continuation is None
        last = whole = stream.first
        events = 0
        try:
            async with WaitLimit(self._settings.token_seconds) as limit:
                while True:
                    if whole:
                        if with_usage and dialect.tells_usage.search(whole):
                            whole = await self._with_usage(whole)
                        if _ERROR in whole:
                            self._note_error(whole)
                        last = whole
                        events += whole.count(b"data:")
                        await self._send_on(client, whole)
                    limit.begin()
                    came = await self._next(stream.parts)
                    self._inter_token(limit.end())
                    if came is None:
                        break
                    whole = came
        except TimeoutError:
            if not limit.expired:
                raise
            raise WorkerFailed(
                PeerTimeout(
                    f"decode worker {party.instance_id!r} at {party.http_address} has sent nothing "
                    f"for {self._settings.token_seconds:g} s"
                ),
                party.instance_id,
            ) from None
        if self.stream_error is None and not dialect.ended(last):
            raise _lost(party, None)
        if self.stream_error is None:
            self.output_tokens = tokens_told(last) or events

    async def _send_on(self, client: Downstream, whole: bytes) -> None:
        rewriting = self._continuation or self._transcript
        if rewriting is not None:
            whole = rewriting.take(whole)
        if not whole:
            return
        if self._transcript is None or self._transcript.begun:
            await client.send(whole)
        else:
            await client.comment(whole)

    async def _with_usage(self, whole: bytes) -> bytes:
        """Returns the events with what prefill knows of the prompt in their usage."""
        dialect, events = self._asked.dialect, []
        for event in events_in(whole):
            data = data_of(event)
            if data is not None and dialect.tells_usage.search(data):
                with contextlib.suppress(*UNREADABLE):
                    told = msgspec.json.decode(data, type=JsonObject)
                    dialect.with_prompt(told, await self._of_prefill())
                    event = with_data(event, told)
            events.append(event)
        return b"".join(events)

    async def _completed(self, content: bytes) -> bytes:
        """Returns decode's answer with what prefill knows of the prompt."""
        dialect = self._asked.dialect
        wanted = self._takes_logprobs or dialect.tells_usage.search(content) is not None
        if self._prefill is None or not wanted:
            return content
        try:
            answer = msgspec.json.decode(content, type=JsonObject)
        except UNREADABLE:
            return content
        of_prefill = await self._of_prefill()
        if of_prefill is None and self._takes_logprobs:
            raise _lost(self._transfer.prefill, None)
        dialect.with_prompt(answer, of_prefill)
        return msgspec.json.encode(answer)

    async def _of_prefill(self) -> JsonObject | None:
        """Waits for prefill's answer; returns None if it is lost although decode has the cache."""
        assert self._prefill is not None  # noqa: S101
        await asyncio.wait({self._prefill}, timeout=_PREFILL_SECONDS)
        return self.of_prefill()

    def of_prefill(self) -> JsonObject | None:
        """Returns prefill's answer; None if there is none, or none yet."""
        answer = self._prefill
        if answer is None or not answer.done() or answer.cancelled():
            return None
        with contextlib.suppress(WorkerFailed, *UNREADABLE):
            return msgspec.json.decode(answer.result(), type=JsonObject)
        return None

    def _note_error(self, whole: bytes) -> None:
        """Keeps the error in these events. Raises WorkerFailed if another worker can go on with the
        stream."""
        party = self._transfer.decode
        address = party.http_address
        for event in events_in(whole):
            with contextlib.suppress(*UNREADABLE):
                data = data_of(event) or b"{}"
                told = msgspec.json.decode(data, type=JsonObject)
                self.stream_error = error_event(address, told, data) or self.stream_error
        goes_on = self._transcript is not None and not self._transcript.refusal
        if goes_on and self.stream_error is not None and not is_refusal(self.stream_error):
            raise WorkerFailed(self.stream_error, party.instance_id)

    def _said(self, party: Party, error: KvxferError) -> WorkerFailed:
        """Returns the failure of the worker that is to blame for an error that `party` reports."""
        pair = self._transfer
        other = pair.prefill if party is pair.decode else pair.decode
        blamed = other if isinstance(error, _OF_THE_OTHER) else party
        return WorkerFailed(error, blamed.instance_id)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and task.exception() is not None


def _said_by(task: asyncio.Task[Any]) -> KvxferError | None:
    """Returns the error with which the task failed, if it did."""
    failure = task.exception() if task.done() else None
    return failure.error if isinstance(failure, WorkerFailed) else None


def _passed(response: httpx2.Response) -> dict[str, str]:
    """Returns the headers of a worker's answer that the client gets."""
    return {name: value for name, value in response.headers.items() if name not in _NOT_PASSED}


def _passed_stream(response: httpx2.Response) -> dict[str, str]:
    return {**_passed(response), "cache-control": "no-cache"}


def _without_api(party: Party) -> WorkerFailed:
    error = ConnectFailed(
        f"instance {party.instance_id!r} is registered without an http_address, so no router can "
        "send it requests; register it with one, or keep its model out of the router's fleet"
    )
    return WorkerFailed(error, party.instance_id)


def _lost(party: Party, error: Exception | None) -> WorkerFailed:
    cause = "its answer is incomplete"
    if error is not None:
        cause = str(error) or type(error).__name__
    lost = PeerLost(f"the worker at {party.http_address} does not answer ({cause})")
    return WorkerFailed(lost, party.instance_id)


def _unreadable(party: Party, what: str) -> WorkerFailed:
    error = ProtocolError(f"the worker at {party.http_address} sent {what}")
    return WorkerFailed(error, party.instance_id)
