"""The transfer engine of one vLLM worker process, with the event loop that it lives on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import httpx

from kvxfer.client import ControlPlaneClient
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.engine import Engine, Peer
from kvxfer.errors import EngineClosed, KvxferError
from kvxfer.instances import InstanceSpec, InstanceState, Load
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.registration import Registration

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.25


class Agent:
    """A thread with an event loop, which owns the engine, the KV endpoint and the registration.

    Any thread may call start(), join(), run(), spawn() and close(); `endpoint` belongs to the loop.
    Each rank of an instance has its own. The first one registers the instance, as joining, and as
    ready once its HTTP API answers; the others have its epoch from there.
    """

    endpoint: KvEndpoint

    def __init__(self, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._ranks: asyncio.Future[tuple[str, ...]] = self._loop.create_future()
        self._joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._main, name="kvxfer-agent", daemon=True)
        self._make_cache: Callable[[Engine], KvCache]

    def start(self, make_cache: Callable[[Engine], KvCache]) -> str:
        """Starts the engine; its address. Raises what keeps it from that."""
        self._make_cache = make_cache
        self._thread.start()
        return self._started.result(_START_SECONDS)

    def join(self, rank_addresses: Sequence[str]) -> None:
        """Returns when the instance is registered, with the engines of all its ranks in their
        order. Raises what keeps it from that."""
        self._loop.call_soon_threadsafe(self._ranks.set_result, tuple(rank_addresses))
        self._joined.result(_START_SECONDS)

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of a coroutine on the loop. Raises TimeoutError after `seconds`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine on the loop; it tells of its end itself."""
        try:
            self._loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError as error:
            work.close()
            raise EngineClosed("the agent of this connector has ended") from error

    def close(self) -> None:
        """Gives the registration up and ends every transfer. Any number of times."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(_CLOSE_SECONDS)

    def _stop(self) -> None:
        self._closing.set()
        self._ranks.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            waiting = [f for f in (self._started, self._joined) if not f.done()]
            if not waiting:
                logger.exception("the transfer engine of this worker has ended")
            for future in waiting:
                future.set_exception(error)

    async def _serve(self) -> None:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(
                Engine(
                    cluster_key=settings.cluster_key,
                    name=settings.instance_id,
                    host=settings.host,
                    fabrics=settings.fabrics,
                    cpus=settings.cpus,
                    peer_timeout=settings.peer_timeout,
                )
            )
            cache = stack.enter_context(self._make_cache(engine))
            self.endpoint = await stack.enter_async_context(
                KvEndpoint(
                    engine,
                    cache,
                    None,
                    instance_id=settings.instance_id,
                    epoch=0,
                    ticket_key=settings.ticket_keys or settings.cluster_key,
                    lease_seconds=settings.lease_seconds,
                )
            )
            self._started.set_result(engine.address)
            addresses = await self._ranks
            if cache.layout.rank == 0:
                await self._belong(self._spec(engine, cache, addresses))
            else:
                await self._follow(addresses[0])

    async def _belong(self, spec: InstanceSpec) -> None:
        """Keeps the place of this instance in the fleet until the agent is closed."""
        async with (
            ControlPlaneClient(self._settings.control_plane) as client,
            Registration(
                client,
                spec,
                state=InstanceState.JOINING,
                load=lambda: Load(running=len(self._tasks)),
                on_epoch=self.endpoint.set_epoch,
            ) as registration,
        ):
            self._joined.set_result(None)
            announcing = asyncio.create_task(self._announce(registration))
            await self._closing.wait()
            announcing.cancel()

    async def _follow(self, first_rank: str) -> None:
        """Has the instance's epoch from its first rank until the agent is closed."""
        following = asyncio.create_task(self._keep_following(first_rank))
        await self._closing.wait()
        following.cancel()

    async def _keep_following(self, first_rank: str) -> None:
        while True:
            try:
                peer = await self.endpoint.follow(first_rank)
            except KvxferError as error:
                logger.warning("the first rank of this instance cannot be reached: %s", error)
            else:
                if not self._joined.done():
                    self._joined.set_result(None)
                await _lost(peer)
            await asyncio.sleep(_POLL_SECONDS)

    def _spec(self, engine: Engine, cache: KvCache, addresses: tuple[str, ...]) -> InstanceSpec:
        settings = self._settings
        return InstanceSpec(
            instance_id=settings.instance_id,
            role=settings.role,
            model=settings.model,
            engine_address=engine.address,
            http_address=settings.http_address,
            layout=cache.layout,
            num_blocks=cache.num_blocks,
            fabrics=engine.fabrics,
            rank_addresses=addresses if len(addresses) > 1 else (),
            labels={"host": socket.gethostname(), **settings.labels},
        )

    async def _announce(self, registration: Registration) -> None:
        """Says that the instance is ready, once its API answers."""
        async with httpx.AsyncClient(timeout=2.0) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.get(self._settings.http_address + "/health")
                    if answer.is_success:
                        break
                await asyncio.sleep(_POLL_SECONDS)
        await registration.advance(InstanceState.READY)
        logger.info("instance %s is ready", self._settings.instance_id)


async def _lost(peer: Peer) -> None:
    lost = asyncio.Event()
    peer.on_lost(lambda _: lost.set())
    await lost.wait()
