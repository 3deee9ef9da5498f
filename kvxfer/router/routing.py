"""From a request to its answer: workers from the control plane, the request at them, others where
one fails before the client has seen anything."""

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
)
from kvxfer.router.asked import Asked
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.continuation import Continuation, limit_of, prevented_by
from kvxfer.router.downstream import Downstream
from kvxfer.router.errors import (
    StreamLost,
    WorkerError,
    WorkerKeyRefused,
    error_object,
)
from kvxfer.router.exchange import Exchange, NotByPair, WorkerFailed
from kvxfer.router.metrics import Metrics
from kvxfer.router.models import FleetModels
from kvxfer.router.rendering import Rendering
from kvxfer.router.settings import RouterSettings
from kvxfer.router.transcript import Transcript
from kvxfer.router.worker_errors import is_refusal
from kvxfer.tracing.span import span
from kvxfer.transfers import MAX_WAIT_SECONDS, OpenedTransfer

# Other workers answer these in the same way.
_FINAL: Final = (InvalidArgument, PromptTooLong, WorkerKeyRefused)
_TRIED_ELSEWHERE: Final = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
# Before the control plane is asked again that did not answer: full jitter below this.
_PAUSE_SECONDS: Final = 0.2
# A request does not wait for less.
_LEAST_SECONDS: Final = 0.01
# Beside a wait for a pair, for the way to the control plane and back.
_ANSWER_SECONDS: Final = 5.0
# The longest before a worker that has failed a request is asked again.
_LONGEST_PAUSE_SECONDS: Final = 0.8
# In an answer that one worker gave instead of a pair.
_UNPAIRED: Final = "Kvxfer-Unpaired"
_ALONE: Final = {
    "no-pair": "no pair of ready workers",
    "short-prompt": "decode lacks little of the prompt",
}
# That POST /v1/transfers takes.
_MOST_AVOIDED: Final = 64


class Router:
    """Routes requests over one control plane, whose client it closes. Loop only; use it inside
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
        self._prompts = Rendering(self._http, self.models, settings, metrics, clock)
        # Who asks for a pair without a wait: no more at once than the client has calls for.
        self._turns = asyncio.Semaphore(MAX_CALLS)
        # Of each model, how many requests the control plane keeps waiting.
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
        """Sends the answer to the client. Raises what the control plane or the workers say in the
        end, where nothing of an answer was sent; else the client is told in its stream."""
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
        """The exchange whose answer the client has. Raises _BrokeOff for one that it has in part.

        It is the answer to a whole request, or the `continuation` of a stream.
        """
        while True:
            if transcript is not None:
                transcript.begin()
            try:
                async with self._attempt(
                    asked, attempts, client, transcript, continuation
                ) as exchange:
                    await exchange.pass_on(client)
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
        """The exchange by which a stream went on that broke off; None where it lacked no token.
        Raises StreamLost."""
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
            client.told = False  # of what follows
            return await self._answered(more, client, attempts, continuation=continuation)
        except _BrokeOff as again:
            raise again.lost(because="as it has gone on once") from again.failure
        except KvxferError as error:
            because = f"as {error_object(error)['message']}"
            raise broke_off.lost(because=because) from error

    async def _continuation(
        self, asked: Asked, transcript: Transcript, broke_off: _BrokeOff
    ) -> Continuation:
        """Raises StreamLost for what the router lacks."""
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
        """How many of the last tokens are the begin of a character, as a worker says."""
        async with self._pair(asked, attempts) as transfer:
            worker = transfer.prefill.http_address
            torn = await self._prompts.torn(tokens, asked.model, worker)
        if torn is None:
            raise ProtocolError(
                f"the worker at {worker} does not tell (POST /detokenize) whether the text of the "
                "last tokens is complete"
            )
        return torn

    async def ready(self) -> None:
        """Raises ControlPlaneUnavailable where requests could not be served."""
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
        """An exchange whose answer may begin."""
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
            # From here on the worker's own load counts the request.
            if continuation is not None:
                self._metrics.continued_streams.inc()
            elif asked.streams:
                self._metrics.first_token.observe(self._clock.monotonic() - asked.arrived)
            yield exchange

    @asynccontextmanager
    async def _pair(self, asked: Asked, attempts: _Attempts) -> AsyncIterator[OpenedTransfer]:
        """A pair, reserved until this is left. Raises NoCapacity or ControlPlaneUnavailable once
        the wait for it is over."""
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
        """Asks for one transfer, by the same name again where an answer was lost."""
        said: NoCapacity | ControlPlaneUnavailable | None = attempts.no_room
        transfer_id = secrets.token_hex(16)
        while True:
            try:
                transfer = await self._ask(transfer_id, give_up, asked, attempts)
            except NotAggregating as error:
                raise asked.not_by_a_pair(error) from None
            except NoCapacity as error:
                # Where too many wait it would be refused again.
                left = give_up - self._clock.monotonic()
                if "retry_after_seconds" in error.details or left < _LEAST_SECONDS:
                    raise
                said = error
            except ControlPlaneUnavailable as error:
                # Asked in the last moment it may not answer: what it said before counts.
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
        """Lets the control plane keep the request waiting for its turn where others of its model
        wait, or where it has refused it."""

        def call(wait: float = 0.0) -> Call[OpenedTransfer]:
            left = max(give_up - self._clock.monotonic(), 0.0)
            return calls.open_transfer(
                transfer_id=transfer_id,
                request_id=asked.request_id,
                model=asked.model,
                prompt_tokens=asked.prompt_tokens,
                prefix_hashes=asked.prefix.hashes,
                tokens_per_hash=asked.prefix.tokens_per_hash,
                avoid=attempts.avoid,
                aggregated=bool(asked.alone),
                or_aggregated=not self._settings.pairs_only and not asked.alone,
                wait_seconds=min(left, wait),
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
        """Where the client leaves meanwhile, what was opened is given back."""
        opening = asyncio.create_task(self._control_plane.send(call))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if call.wait_seconds:
                opening.cancel()  # the control plane sees that, and the place is free
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
        """The stream's end, where `member`, or something else, keeps it from going on."""
        because = because or (f"because of {member}" if member else "")
        return StreamLost(self.failure.error, because, member or None)


class _Attempts:
    """How often a request was tried, on whom, and until when it may be.

    A worker without free blocks costs no attempt: the request waits for room as it waits for a
    pair, for both together as long as `capacity_seconds` say. Another failure begins a new wait.
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
        """What a request ends with that has waited for room in vain."""

    @property
    def avoid(self) -> list[str]:
        """The workers that have failed the request, as many as a pair may be asked for without."""
        return list(self._avoid)[-_MOST_AVOIDED:]

    @property
    def last(self) -> bool:
        """Whether no attempt follows another error of a worker's own."""
        return self._left == 1 or self._server_errors > 0

    def seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0.0)

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Counts the time inside as waited for a pair; gives the end of the wait."""
        began = self._clock.monotonic()
        try:
            yield began + min(self._patience, self.seconds_left())
        finally:
            self._patience -= self._clock.monotonic() - began

    def pause(self, transfer: OpenedTransfer, give_up: float) -> float:
        """Seconds to give a worker that has failed the request before it comes to it again, as
        there is no other: full jitter, twice as long after each failure."""
        pair = (transfer.prefill.instance_id, transfer.decode.instance_id)
        if self._avoid.keys().isdisjoint(pair):
            return 0.0
        most = min(_PAUSE_SECONDS * 2 ** (self._failed - 1), _LONGEST_PAUSE_SECONDS)
        left = max(give_up - self._clock.monotonic(), 0.0)
        return min(random.uniform(0, most), left)  # noqa: S311 (no secret)

    def avoid_first(self, instance_id: str) -> None:
        """Avoids a worker that has failed the request before."""
        self._avoid[instance_id] = None

    def failed(self, failure: WorkerFailed) -> None:
        """Returns where another attempt may be made; raises the error otherwise."""
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
            # Perhaps this worker's fault, perhaps the request's: once more tells.
            self._server_errors += 1
            final = final or self._server_errors > 1
        if final or not self._left or not self.seconds_left():
            raise error from failure
        self._failed += 1
        self._avoid.pop(failure.instance_id, None)
        self._avoid[failure.instance_id] = None
        self._metrics.retries.labels(error.code).inc()
