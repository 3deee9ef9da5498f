"""Routing: the control plane names workers, and they get the request; if one fails before the
client has seen anything, others get it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final, Self

import httpx2

from kvxfer.client import ControlPlaneClient, calls
from kvxfer.client.calls import Call
from kvxfer.client.clients import MAX_CALLS
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import (
    BlockPoolExhausted,
    ControlPlaneUnavailable,
    InvalidArgument,
    KvxferError,
    NoCapacity,
    NotAggregating,
    PromptTooLong,
    ProtocolError,
    WorkerError,
    WorkerKeyRefused,
)
from kvxfer.router.asked import Asked
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.continuation import Continuation, limit_of, prevented_by
from kvxfer.router.downstream import Downstream
from kvxfer.router.errors import StreamLost, error_object
from kvxfer.router.exchange import Exchange, NotByPair, WorkerFailed
from kvxfer.router.metrics import Metrics
from kvxfer.router.models import FleetModels
from kvxfer.router.output_lengths import OutputLengths
from kvxfer.router.rendering import Rendering
from kvxfer.router.settings import RouterSettings
from kvxfer.router.transcript import Transcript
from kvxfer.router.worker_errors import is_refusal
from kvxfer.tracing.span import span
from kvxfer.transfers import MAX_WAIT_SECONDS, OpenedTransfer

# Other workers would answer the same.
_FINAL: Final = (InvalidArgument, PromptTooLong, WorkerKeyRefused)
_TRIED_ELSEWHERE: Final = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
# The longest pause before a control plane that did not answer is asked again; full jitter.
_PAUSE_SECONDS: Final = 0.2
# A request with less time left does not wait for a pair.
_LEAST_SECONDS: Final = 0.01
# The time of a request to the control plane, in addition to its wait for a pair.
_ANSWER_SECONDS: Final = 5.0
# The longest pause before a worker that failed a request gets it again.
_LONGEST_PAUSE_SECONDS: Final = 0.8
# The header of an answer that one worker gave instead of a pair.
_UNPAIRED: Final = "Kvxfer-Unpaired"
_ALONE: Final = {
    "no-pair": "no pair of ready workers",
    "short-prompt": "decode lacks little of the prompt",
}
# The most that POST /v1/transfers takes.
_MOST_AVOIDED: Final = 64


class Router:
    """A router over one control plane, whose client it closes. Loop only; use it inside
    `async with`."""

    def __init__(
        self,
        settings: RouterSettings,
        control_plane: ControlPlaneClient,
        metrics: Metrics,
        *,
        clock: Clock = SYSTEM_CLOCK,
        workers: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._control_plane = control_plane
        self._metrics = metrics
        self._clock = clock
        self._http = WorkerConnections(workers)
        self.models = FleetModels(control_plane, self._http, settings, clock)
        self._lengths = OutputLengths()
        self._prompts = Rendering(self._http, self.models, settings, metrics, clock)
        # Bounds the requests that ask for a pair without a wait by the client's calls at once.
        self._turns = asyncio.Semaphore(MAX_CALLS)
        # The number of requests of each model that the control plane keeps waiting.
        self._queued: Counter[str | None] = Counter()
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._releases)
        await self._prompts.close()
        await self._http.aclose()
        await self._control_plane.close()

    async def serve(self, asked: Asked, client: Downstream) -> None:
        """Sends the answer to the client. Raises the last error of the control plane or the workers
        if nothing was sent yet; otherwise the error goes into the client's stream."""
        try:
            with self._counted():
                await self._serve(asked, client)
        except StreamLost as lost:
            self._metrics.failed_streams.labels(lost.error.code).inc()
            await client.send(asked.dialect.error_event(lost.error_object()))
        except KvxferError as error:
            if not client.begun:
                raise
            await client.send(asked.dialect.error_event(error_object(error)))

    async def _serve(self, asked: Asked, client: Downstream) -> None:
        if asked.model is None:
            asked = replace(asked, model=await self.models.only())
        asked = await self._prompts.prepared(asked)
        attempts = _Attempts(asked, self._settings, self._metrics, self._clock)
        going_on = self._settings.continue_streams and asked.streams
        prevented = prevented_by(asked) if going_on else ""
        transcript = Transcript(asked) if going_on and not prevented else None
        exchange: Exchange | None
        try:
            exchange = await self._answered(asked, client, attempts, transcript=transcript)
        except _BrokeOff as broke_off:
            if transcript is None:
                raise broke_off.lost(prevented) from broke_off.failure
            exchange = await self._gone_on(asked, client, transcript, broke_off)
        if exchange is not None and exchange.stream_error is not None:
            self._metrics.failed_streams.labels(exchange.stream_error.code).inc()

    async def _answered(
        self,
        asked: Asked,
        client: Downstream,
        attempts: _Attempts,
        *,
        transcript: Transcript | None = None,
        continuation: Continuation | None = None,
    ) -> Exchange:
        """Returns the exchange whose answer the client got. Raises _BrokeOff if it got only a part.

        The answer is that of a whole request, or the `continuation` of a stream.
        """
        while True:
            if transcript is not None:
                transcript.begin()
            try:
                async with self._attempt(
                    asked, attempts, client, transcript, continuation
                ) as exchange:
                    await exchange.pass_on(client)
                if continuation is None:
                    self._lengths.ended(asked.model, exchange.output_tokens)
                return exchange
            except WorkerFailed as failure:
                if client.told:
                    raise _BrokeOff(failure, exchange.of_prefill()) from failure
                attempts.failed(failure)
            except NotByPair as member:
                asked = replace(asked, alone=str(member))

    async def _gone_on(
        self, asked: Asked, client: Downstream, transcript: Transcript, broke_off: _BrokeOff
    ) -> Exchange | None:
        """Returns the exchange by which a broken stream went on; None if it lacked no token. Raises
        StreamLost."""
        if (ending := transcript.ending(broke_off.of_prefill)) is not None:
            await client.send(ending)
            return None
        try:
            continuation = await self._continuation(asked, transcript, broke_off)
            more = await self._prompts.prepared(continuation.request(self._clock.monotonic()))
            attempts = _Attempts(more, self._settings, self._metrics, self._clock)
            attempts.avoid_first(broke_off.failure.instance_id)
            if not continuation.certain and (
                torn := await self._torn(more, transcript.tokens, attempts)
            ):
                if transcript.tells_ids:
                    raise broke_off.lost("return_token_ids")
                continuation.drop(torn)
                more = await self._prompts.prepared(continuation.request(more.arrived))
            client.told = False  # nothing of what follows is sent
            return await self._answered(more, client, attempts, continuation=continuation)
        except _BrokeOff as again:
            raise again.lost(because="as it has gone on once") from again.failure
        except KvxferError as error:
            because = f"as {error_object(error)['message']}"
            raise broke_off.lost(because=because) from error

    async def _continuation(
        self, asked: Asked, transcript: Transcript, broke_off: _BrokeOff
    ) -> Continuation:
        """Raises StreamLost if the router lacks something for it."""
        if transcript.refusal:
            raise broke_off.lost(transcript.refusal)
        if (prompt := transcript.prompt) is None:
            raise broke_off.lost("return_token_ids")
        limit = limit_of(asked)
        if limit is None and (context := await self.models.context_length(asked.model or "")):
            limit = context - len(prompt)
        if limit is None or limit <= len(transcript.tokens):
            raise broke_off.lost("max_tokens")
        return Continuation(asked, transcript, prompt, limit, broke_off.of_prefill)

    async def _torn(self, asked: Asked, tokens: list[int], attempts: _Attempts) -> int:
        """Asks a worker how many of the last tokens begin a character that is not complete."""
        async with self._pair(asked, attempts) as transfer:
            worker = transfer.prefill.http_address
            torn = await self._prompts.torn(tokens, asked.model, worker)
        if torn is None:
            raise ProtocolError(
                f"the worker at {worker} does not say (POST /detokenize) whether the text of the "
                "last tokens is complete"
            )
        return torn

    async def ready(self) -> None:
        """Raises ControlPlaneUnavailable if requests cannot be served."""
        await self._control_plane.ready()

    @asynccontextmanager
    async def _attempt(
        self,
        asked: Asked,
        attempts: _Attempts,
        client: Downstream,
        transcript: Transcript | None,
        continuation: Continuation | None,
    ) -> AsyncIterator[Exchange]:
        """Yields an exchange once its answer may begin."""
        async with contextlib.AsyncExitStack() as under_way:
            async with self._pair(asked, attempts) as transfer:
                client.headers.pop(_UNPAIRED, None)
                if transfer.aggregated and not asked.alone:
                    because = transfer.alone_because or "no-pair"
                    asked = replace(asked, alone=_ALONE.get(because, because))
                    client.headers[_UNPAIRED] = because.replace("-", " ")
                    self._metrics.unpaired.labels(because).inc()
                asked = await self._prompts.rendered(asked, transfer.prefill.http_address)
                exchange = await under_way.enter_async_context(
                    Exchange(
                        *(self._http, transfer, asked, self._settings),
                        last=attempts.last,
                        transcript=transcript,
                        continuation=continuation,
                        inter_token=self._metrics.inter_token.observe,
                    )
                )
                await exchange.begin(client, attempts.seconds_left())
            # The worker's own load counts the request from here on.
            if continuation is not None:
                self._metrics.continued_streams.inc()
            elif asked.streams:
                self._metrics.first_token.observe(self._clock.monotonic() - asked.arrived)
            yield exchange

    @asynccontextmanager
    async def _pair(self, asked: Asked, attempts: _Attempts) -> AsyncIterator[OpenedTransfer]:
        """Yields a pair, reserved until the block ends. Raises NoCapacity or
        ControlPlaneUnavailable at the end of the wait for a pair."""
        with contextlib.ExitStack() as reserved:
            with (
                attempts.waiting() as give_up,
                self._metrics.waiting.track_inprogress(),
                span("ticket") as waiting,
            ):
                transfer = await self._pair_before(give_up, asked, attempts)
                reserved.callback(self._release, transfer)
                if waiting is not None:
                    waiting.set(
                        transfer_id=transfer.transfer_id,
                        prefill_id=transfer.prefill.instance_id,
                        decode_id=transfer.decode.instance_id,
                    )
                await asyncio.sleep(attempts.pause(transfer, give_up))
            yield transfer

    async def _pair_before(
        self, give_up: float, asked: Asked, attempts: _Attempts
    ) -> OpenedTransfer:
        """Asks for one transfer; asks again, by the same name, if the answer is lost."""
        said: NoCapacity | ControlPlaneUnavailable | None = attempts.no_room
        transfer_id = secrets.token_hex(16)
        while True:
            try:
                transfer = await self._ask(transfer_id, give_up, asked, attempts)
            except NotAggregating as error:
                raise asked.not_by_a_pair(error) from None
            except NoCapacity as error:
                # If too many requests wait, it would be refused again.
                left = give_up - self._clock.monotonic()
                if "retry_after_seconds" in error.details or left < _LEAST_SECONDS:
                    raise
                said = error
            except ControlPlaneUnavailable as error:
                # A call with too little time left may get no answer: an earlier answer counts.
                said = error if said is None or not error.hurried else said
                pause = random.uniform(0, _PAUSE_SECONDS)  # noqa: S311 (no secret)
                if self._clock.monotonic() + pause > give_up:
                    self._background(self._release_now(transfer_id))  # it may be open
                    raise said from said.__cause__
                await asyncio.sleep(pause)
            else:
                if asked.model is not None:
                    self.models.seen(asked.model)
                    self._prompts.served(asked.model, transfer)
                return transfer

    async def _ask(
        self, transfer_id: str, give_up: float, asked: Asked, attempts: _Attempts
    ) -> OpenedTransfer:
        """Asks for a transfer. The control plane keeps the request waiting for its turn if others
        of its model wait, or if it has refused it."""

        def call(wait: float = 0.0) -> Call[OpenedTransfer]:
            left = max(give_up - self._clock.monotonic(), 0.0)
            return calls.open_transfer(
                transfer_id=transfer_id,
                request_id=asked.request_id,
                model=asked.model,
                prompt_tokens=asked.prompt_tokens,
                output_tokens=self._lengths.expected(asked),
                prefix_hashes=asked.prefix.hashes,
                tokens_per_hash=asked.prefix.tokens_per_hash,
                avoid=attempts.avoid,
                aggregated=bool(asked.alone),
                or_aggregated=not self._settings.pairs_only and not asked.alone,
                wait_seconds=min(left, wait),
                waited_seconds=max(self._clock.monotonic() - asked.arrived, 0.0),
                priority=asked.priority if self._settings.priorities else 0,
                tenant=asked.tenant,
            ).within(left + (_ANSWER_SECONDS if wait else 0.0))

        async with self._turns:
            if not self._queued[asked.model]:
                try:
                    return await self._open(call(), transfer_id)
                except NoCapacity:
                    if asked.model is not None:
                        await self.models.require(asked.model)
                    if give_up - self._clock.monotonic() < _LEAST_SECONDS:
                        raise
        with self._queuing(asked.model):
            return await self._open(call(MAX_WAIT_SECONDS), transfer_id)

    @contextmanager
    def _queuing(self, model: str | None) -> Iterator[None]:
        self._queued[model] += 1
        try:
            yield
        finally:
            self._queued[model] -= 1
            if not self._queued[model]:
                del self._queued[model]

    async def _open(self, call: Call[OpenedTransfer], transfer_id: str) -> OpenedTransfer:
        """Opens a transfer, and releases it if the client leaves meanwhile."""
        opening = asyncio.create_task(self._control_plane.send(call))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if call.wait_seconds:
                opening.cancel()  # the control plane sees that, and frees the place
            self._background(self._release_opened(opening, transfer_id))
            raise

    def _release(self, transfer: OpenedTransfer) -> None:
        """Gives a reservation back without making the request wait for it."""
        self._background(self._release_now(transfer.transfer_id))

    async def _release_opened(
        self, opening: asyncio.Task[OpenedTransfer], transfer_id: str
    ) -> None:
        await asyncio.wait([opening])
        if opening.cancelled() or not isinstance(opening.exception(), NoCapacity):
            await self._release_now(transfer_id)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release_now(self, transfer_id: str) -> None:
        # A reservation that cannot be given back ends with its ticket.
        with contextlib.suppress(KvxferError):
            await self._control_plane.release_transfer(transfer_id)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.aborted.inc()
            raise
        except KvxferError as error:
            self._metrics.failures.labels(error.code).inc()
            raise
        except StreamLost as lost:
            self._metrics.failures.labels(lost.error.code).inc()
            raise


class _BrokeOff(Exception):
    """A worker failed in the middle of a stream; `of_prefill` is what prefill answered."""

    def __init__(self, failure: WorkerFailed, of_prefill: dict[str, Any] | None) -> None:
        super().__init__(str(failure))
        self.failure, self.of_prefill = failure, of_prefill

    def lost(self, member: str = "", because: str = "") -> StreamLost:
        """Returns the error of a stream that `member`, or else `because`, keeps from going on."""
        because = because or (f"because of {member}" if member else "")
        return StreamLost(self.failure.error, because, member or None)


class _Attempts:
    """The attempts of one request: those that are left, the workers that failed, and the deadline.

    A worker without free blocks costs no attempt: the request waits for room as it waits for a
    pair, `capacity_seconds` for both together. Another failure begins a new wait.
    """

    def __init__(
        self, asked: Asked, settings: RouterSettings, metrics: Metrics, clock: Clock
    ) -> None:
        self._clock = clock
        self._left = settings.attempts
        self._deadline = asked.arrived + settings.first_token_seconds
        self._capacity_seconds = self._patience = settings.capacity_seconds
        self._metrics = metrics
        self._failed = 0
        self._server_errors = 0
        self._avoid: dict[str, None] = {}
        self.no_room: NoCapacity | None = None
        """The error of a request that waits for room in vain."""

    @property
    def avoid(self) -> list[str]:
        """The workers that failed the request, the last ones that a call for a pair may exclude."""
        return list(self._avoid)[-_MOST_AVOIDED:]

    @property
    def last(self) -> bool:
        """Whether no attempt follows the next error that a worker reports of itself."""
        return self._left == 1 or self._server_errors > 0

    def seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0.0)

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Counts the time inside as a wait for a pair; yields the end of the wait."""
        began = self._clock.monotonic()
        try:
            yield began + min(self._patience, self.seconds_left())
        finally:
            self._patience -= self._clock.monotonic() - began

    def pause(self, transfer: OpenedTransfer, give_up: float) -> float:
        """Returns the seconds before a worker that failed the request gets it again, as there is no
        other: full jitter, with a bound that doubles after each failure."""
        pair = (transfer.prefill.instance_id, transfer.decode.instance_id)
        if self._avoid.keys().isdisjoint(pair):
            return 0.0
        most = min(_PAUSE_SECONDS * 2 ** (self._failed - 1), _LONGEST_PAUSE_SECONDS)
        left = max(give_up - self._clock.monotonic(), 0.0)
        return min(random.uniform(0, most), left)  # noqa: S311 (no secret)

    def avoid_first(self, instance_id: str) -> None:
        """Avoids a worker that failed the request before."""
        self._avoid[instance_id] = None

    def failed(self, failure: WorkerFailed) -> None:
        """Returns if another attempt may be made; raises the error otherwise."""
        error = failure.error
        if isinstance(error, BlockPoolExhausted):
            waited = f"no worker had room for the request within {self._capacity_seconds:g} s"
            self.no_room = NoCapacity(waited, reasons=[str(error)])
            if self._patience <= 0:
                raise self.no_room from failure
        else:
            self._left -= 1
            self._patience = self._capacity_seconds
        final = isinstance(error, _FINAL) or is_refusal(error)
        if isinstance(error, WorkerError) and error.status not in _TRIED_ELSEWHERE:
            # The worker or the request may be at fault: one more attempt shows which.
            self._server_errors += 1
            final = final or self._server_errors > 1
        if final or not self._left or not self.seconds_left():
            raise error from failure
        self._failed += 1
        self._avoid.pop(failure.instance_id, None)
        self._avoid[failure.instance_id] = None
        self._metrics.retries.labels(error.code).inc()
