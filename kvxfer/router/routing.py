"""From a request to its tokens: a pair from the control plane, both workers, another pair where one
fails before the client has seen anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Self

import httpx2

from kvxfer.client import ControlPlaneClient, calls
from kvxfer.client.calls import Call
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    KvxferError,
    NoCapacity,
    PromptTooLong,
)
from kvxfer.instances import Instance, InstanceState
from kvxfer.router.completion import CompletionRequest, collect
from kvxfer.router.connections import worker_client
from kvxfer.router.errors import Overloaded, UnknownModel
from kvxfer.router.exchange import Chunk, Exchange, WorkerFailed
from kvxfer.router.metrics import Metrics
from kvxfer.router.settings import RouterSettings
from kvxfer.router.tokenizing import Tokenizing
from kvxfer.tracing.span import span
from kvxfer.transfers import OpenedTransfer

# Another pair answers these in the same way.
_FINAL: Final = (InvalidArgument, PromptTooLong)
# Between two questions for a pair while there is none: full jitter below this.
_PAUSE_SECONDS: Final = 0.2


class Router:
    """Routes completions over one control plane, whose client it closes. Loop only; use it inside
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
        self._http = worker_client(workers)
        self._prompts = Tokenizing(self._http, settings, metrics, clock)
        self._running = 0
        self._models: set[str] = set()
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._releases)
        await self._prompts.close()
        await self._http.aclose()
        await self._control_plane.close()

    async def complete(self, request: CompletionRequest) -> Chunk:
        """The whole completion. Raises what the control plane or the workers say in the end."""
        with self._counted():
            request = await self._prompts.tokenized(request)
            attempts = _Attempts(request, self._settings, self._metrics, self._clock)
            while True:
                try:
                    async with self._attempt(request, attempts) as exchange:
                        return await collect(self._timed(exchange))
                except WorkerFailed as failure:
                    attempts.failed(failure)

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[Chunk, None]:
        """The completion as decode's chunks come, the last of them its usage.

        Nothing is read ahead: a reader that waits makes decode wait. Raises as complete() does,
        after the first token without another attempt.
        """
        with self._counted():
            request = await self._prompts.tokenized(request)
            attempts = _Attempts(request, self._settings, self._metrics, self._clock)
            while True:
                begun = False
                try:
                    async with (
                        self._attempt(request, attempts) as exchange,
                        aclosing(self._timed(exchange)) as chunks,
                    ):
                        async for chunk in chunks:
                            begun = True
                            yield chunk
                        return
                except WorkerFailed as failure:
                    if begun:
                        self._metrics.failed_streams.labels(failure.error.code).inc()
                        raise failure.error from failure
                    attempts.failed(failure)

    async def models(self) -> dict[str, Instance]:
        """What requests may ask for, by name: models, aliases and adapters, each with a ready
        instance that has it."""
        found = await self._control_plane.instances(state=InstanceState.READY)
        first = {name: each for each in reversed(found) for name in _names(each)}
        self._models.update(first)
        return {name: first[name] for name in sorted(first)}

    async def ready(self) -> None:
        """Raises ControlPlaneUnavailable where requests could not be served."""
        await self._control_plane.ready()

    @asynccontextmanager
    async def _attempt(
        self, request: CompletionRequest, attempts: _Attempts
    ) -> AsyncIterator[Exchange]:
        """An exchange that has its first token."""
        transfer = await self._pair(request, attempts)
        if attempts.knows(transfer):
            await asyncio.sleep(attempts.pause())
        async with Exchange(
            self._http,
            transfer,
            request.body,
            path=request.path,
            headers={**request.headers, **self._settings.headers_for_workers()},
            handshake=self._settings.handshake,
            token_seconds=self._settings.token_seconds,
        ) as exchange:
            try:
                await exchange.begin(attempts.seconds_left())
            finally:
                # From here on decode's own load counts the request.
                self._release(transfer)
            self._metrics.first_token.observe(self._clock.monotonic() - request.arrived)
            yield exchange

    async def _pair(self, request: CompletionRequest, attempts: _Attempts) -> OpenedTransfer:
        """Raises NoCapacity or ControlPlaneUnavailable once the wait for a pair is over."""
        give_up = self._clock.monotonic() + min(
            self._settings.capacity_seconds, attempts.seconds_left()
        )
        with self._metrics.waiting.track_inprogress(), span("ticket") as waiting:
            transfer = await self._pair_before(give_up, request, attempts)
            if waiting is not None:
                waiting.set(
                    transfer_id=transfer.transfer_id,
                    prefill_id=transfer.prefill.instance_id,
                    decode_id=transfer.decode.instance_id,
                )
            return transfer

    async def _pair_before(
        self, give_up: float, request: CompletionRequest, attempts: _Attempts
    ) -> OpenedTransfer:
        said: NoCapacity | ControlPlaneUnavailable | None = None
        while True:
            try:
                call = calls.open_transfer(
                    request_id=request.request_id,
                    model=request.model,
                    prompt_tokens=request.prompt_tokens,
                    prefix_hashes=request.prefix.hashes,
                    tokens_per_hash=request.prefix.tokens_per_hash,
                    avoid=attempts.avoid,
                )
                left = max(give_up - self._clock.monotonic(), 0.0)
                transfer = await self._open(call.within(left))
            except (NoCapacity, ControlPlaneUnavailable) as error:
                if isinstance(error, NoCapacity):
                    await self._require_model(request.model)
                # Asked in the last moment it may not answer: what it said before counts.
                hurried = isinstance(error, ControlPlaneUnavailable) and error.hurried
                said = error if said is None or not hurried else said
                pause = random.uniform(0, _PAUSE_SECONDS)  # noqa: S311 (no secret)
                if self._clock.monotonic() + pause > give_up:
                    raise said from said.__cause__
                await asyncio.sleep(pause)
            else:
                self._models.add(request.model)
                self._prompts.served(request.model, transfer)
                return transfer

    async def _open(self, call: Call[OpenedTransfer]) -> OpenedTransfer:
        """Where the client leaves meanwhile, what was opened is given back."""
        opening = asyncio.create_task(self._control_plane.send(call))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._background(self._release_opened(opening))
            raise

    async def _require_model(self, model: str) -> None:
        """Raises UnknownModel where there are instances and none ever ran the model.

        A fleet that comes back to a control plane which lost its memory is no reason.
        """
        if model in self._models:
            return
        with contextlib.suppress(ControlPlaneUnavailable):
            instances = await self._control_plane.instances()
            fleet = {name for each in instances for name in _names(each)}
            self._models |= fleet
            if fleet and model not in fleet:
                raise UnknownModel(
                    f"no instance runs the model {model!r}; there are {', '.join(sorted(fleet))}"
                )

    def _release(self, transfer: OpenedTransfer) -> None:
        """Gives a reservation back without making the request wait for it."""
        self._background(self._release_now(transfer.transfer_id))

    async def _release_opened(self, opening: asyncio.Task[OpenedTransfer]) -> None:
        with contextlib.suppress(KvxferError):
            await self._release_now((await opening).transfer_id)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release_now(self, transfer_id: str) -> None:
        # A reservation that cannot be given back ends with its ticket.
        with contextlib.suppress(KvxferError):
            await self._control_plane.release_transfer(transfer_id)

    async def _timed(self, exchange: Exchange) -> AsyncGenerator[Chunk, None]:
        asked: float | None = None
        async with aclosing(exchange.chunks()) as chunks:
            async for chunk in chunks:
                if asked is not None and chunk["choices"]:
                    self._metrics.inter_token.observe(self._clock.monotonic() - asked)
                yield chunk
                asked = self._clock.monotonic()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._running >= self._settings.max_requests:
            self._metrics.failures.labels(Overloaded.code).inc()
            raise Overloaded(
                f"{self._running} requests are under way, as many as this router takes; retry"
            )
        self._running += 1
        self._metrics.running.inc()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.aborted.inc()
            raise
        except KvxferError as error:
            self._metrics.failures.labels(error.code).inc()
            raise
        finally:
            self._running -= 1
            self._metrics.running.dec()


def _names(instance: Instance) -> tuple[str, ...]:
    return (instance.model, *instance.load.models)


class _Attempts:
    """How often a request was tried, on whom, and until when it may be."""

    def __init__(
        self, request: CompletionRequest, settings: RouterSettings, metrics: Metrics, clock: Clock
    ) -> None:
        self._clock = clock
        self._left = settings.attempts
        self._deadline = request.arrived + settings.first_token_seconds
        self._metrics = metrics
        self._failed = 0
        self.avoid: set[str] = set()

    def seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0.0)

    def knows(self, transfer: OpenedTransfer) -> bool:
        """Whether a worker of the pair has failed this request before: there was no other."""
        return not self.avoid.isdisjoint(
            (transfer.prefill.instance_id, transfer.decode.instance_id)
        )

    def pause(self) -> float:
        """Seconds to give a worker that has failed before the request comes to it again: full
        jitter, twice as long after each failure."""
        most = _PAUSE_SECONDS * 2 ** (self._failed - 1)
        return random.uniform(0, min(most, self.seconds_left()))  # noqa: S311 (no secret)

    def failed(self, failure: WorkerFailed) -> None:
        """Returns where another attempt may be made; raises the error otherwise."""
        self._left -= 1
        if isinstance(failure.error, _FINAL) or not self._left or not self.seconds_left():
            raise failure.error from failure
        self._failed += 1
        self.avoid.add(failure.instance_id)
        self._metrics.retries.labels(failure.error.code).inc()
