"""The transfer engine and the KV endpoint of one worker, from its connector's settings, and its
registration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import httpx2
from msgspec import Meta

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client import ControlPlaneClient, Registration
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.api_watch import ApiWatch
from kvxfer.engine import Engine
from kvxfer.engine.operator_options import OperatorOptions, engine_options
from kvxfer.engine.options import DEFAULT_PEER_TIMEOUT
from kvxfer.instances import InstanceSpec, InstanceState, Load
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.ticket import Ticket, TicketKeys, as_ticket_keys
from kvxfer.watched_file import WatchedFile

if TYPE_CHECKING:
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

DEFAULT_HOST: Final = "127.0.0.1"
_POLL_SECONDS: Final = 0.25
# Seconds from the registration during which a server may not answer without a warning.
_QUIET_SECONDS: Final = 30.0
# Consecutive refused connections that show that no server listens.
_REFUSALS: Final = 4

MakeCache = Callable[[Engine], KvCache]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that every connector has."""

    cluster_key: bytes = field(repr=False)
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    options: OperatorOptions = field(default_factory=OperatorOptions)
    """Options of the transfer engine of each rank."""
    lease_seconds: Annotated[float, Meta(gt=0, lt=3600)] = 30.0
    """Seconds that a side waits for the other."""
    checksums: bool = False
    """Whether every transfer's blocks are checked by a checksum, whatever the other side sets."""

    @property
    def host(self) -> str:
        """The numeric address at which the other side finds the transfer engine."""
        return self.options.get("advertise") or self.options.get("host", DEFAULT_HOST)

    @property
    def peer_timeout(self) -> float:
        """Seconds without a heartbeat after which the other side counts as frozen."""
        return self.options.get("peer_timeout", DEFAULT_PEER_TIMEOUT)

    @property
    def keys(self) -> TicketKeys:
        """The current ticket keys."""
        if self.ticket_keys is None:
            return as_ticket_keys(self.cluster_key)
        return self.ticket_keys.current


def pci_address(kind: str, index: int | None) -> str | None:
    """Returns the PCI address of a `torch.device`'s GPU as sysfs writes it, independent of
    CUDA_VISIBLE_DEVICES; None for other devices, and if torch does not report it."""
    if kind != "cuda":
        return None
    import torch

    gpu: Any = torch.cuda.get_device_properties(index)  # the type stubs lack these
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return None


@contextlib.asynccontextmanager
async def transfer_engine(
    settings: EngineSettings,
    make_cache: MakeCache,
    *,
    instance_id: str,
    epoch: int = 0,
    gpu: str | None = None,
    root: Path = Path("/"),
    log: logging.Logger = logger,
    model: ModelIdentity | None = None,
    on_offer: Callable[[Ticket], None] | None = None,
    tracer: Tracer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[tuple[Engine, KvCache, KvEndpoint]]:
    """Yields an engine, its cache and its endpoint. They belong to the loop that enters this, and
    end when it is left.

    gpu: the PCI address of the GPU whose memory is moved; None for host memory.
    root: the folder of sys/, proc/ and dev/, from which the nearest NICs are chosen.
    log: receives which NICs are used.
    """
    options = engine_options(settings.options, gpu, log, root=root)
    options["name"] = instance_id
    async with Engine(cluster_key=settings.cluster_key, **options) as engine:
        with make_cache(engine) as cache:
            endpoint = KvEndpoint(
                engine,
                cache,
                None,
                KvIdentity(instance_id, settings.ticket_keys or settings.cluster_key, epoch, model),
                KvOptions(
                    lease_seconds=settings.lease_seconds,
                    # A frozen worker does not answer either.
                    connect_timeout=settings.peer_timeout,
                    on_offer=on_offer,
                    checksums=settings.checksums,
                    tracer=tracer,
                    clock=clock,
                ),
            )
            async with endpoint:
                yield engine, cache, endpoint


@contextlib.asynccontextmanager
async def fleet_place(
    control_plane: str | None,
    spec: InstanceSpec,
    *,
    load: Callable[[], Load],
    api: ApiWatch,
    asleep: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[int], None] | None = None,
    cached: CachedBlocks | None = None,
) -> AsyncIterator[Registration]:
    """Registers the instance as joining, and as ready while its HTTP API answers and it is not
    `asleep`. Runs `api` meanwhile. Raises what Registration raises."""
    _mute_requests()
    async with (
        ControlPlaneClient(control_plane) as client,
        Registration(
            client,
            spec,
            state=InstanceState.JOINING,
            load=load,
            on_epoch=on_epoch,
            cached=cached,
        ) as registration,
    ):
        announcing = asyncio.create_task(_announce(registration, spec.http_address, asleep))
        watching = asyncio.create_task(api.run())
        try:
            yield registration
        finally:
            announcing.cancel()
            watching.cancel()


def _mute_requests() -> None:
    """Silences httpx2's info log, with a line for every heartbeat, unless its level was set."""
    requests = logging.getLogger("httpx2")
    if requests.level == logging.NOTSET:
        requests.setLevel(logging.WARNING)


async def _announce(
    registration: Registration, http_address: str, asleep: Callable[[], bool]
) -> None:
    """Keeps the instance ready while its API answers. A server that is killed may leave its engine
    running, and this task in it."""
    while True:
        await _until_it_answers(registration.instance_id, http_address, asleep)
        await registration.advance(InstanceState.READY)
        logger.info("instance %s is ready", registration.instance_id)
        await _until_nothing_listens(http_address)
        if await registration.withdraw():
            logger.warning(
                "nothing listens at %s any more: instance %s gets no requests until its API "
                "answers again; if its server was killed, end its other processes, too",
                http_address,
                registration.instance_id,
            )


async def _until_it_answers(
    instance_id: str, http_address: str, asleep: Callable[[], bool]
) -> None:
    """Waits until the API answers and the instance is awake. After a quiet period, warns once of
    each reason why it is not ready."""
    url, told = f"{http_address}/health", set[str]()
    clock = asyncio.get_running_loop().time
    quiet_until = clock() + _QUIET_SECONDS
    async with httpx2.AsyncClient(timeout=2.0) as http:
        while True:
            try:
                status = (await http.get(url)).status_code
            except httpx2.HTTPError as error:
                why = f"does not answer ({error!r})"
            else:
                if status < 300 and not asleep():
                    return
                why = "" if status < 300 else f"answers {status}"
            if why and why not in told and clock() > quiet_until:
                told.add(why)
                logger.warning(
                    "instance %s is not ready and gets no requests: %s %s; is its server still "
                    "starting, and can others reach it at http_address?",
                    *(instance_id, url, why),
                )
            await asyncio.sleep(_POLL_SECONDS)


async def _until_nothing_listens(http_address: str) -> None:
    """Waits until connections are refused. A busy server is slow to answer, but refuses none."""
    url = urlsplit(http_address)
    port = url.port or (443 if url.scheme == "https" else 80)
    refusals = 0
    while refusals < _REFUSALS:
        await asyncio.sleep(_POLL_SECONDS)
        try:
            # asyncio's own function does not report that all addresses of a name refuse.
            (await asyncio.to_thread(socket.create_connection, (url.hostname, port), 2.0)).close()
        except ConnectionRefusedError:
            refusals += 1
        except OSError:
            refusals = 0
        else:
            refusals = 0
