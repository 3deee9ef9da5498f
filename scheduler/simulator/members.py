"""The workers of a simulated fleet: virtual time, their places in the real registry, heartbeats."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from kvxfer.instances import InstanceSpec, InstanceState, Load, Role
from kvxfer.layout import KvLayout
from kvxfer.load_meter import LoadMeter
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS, WorkerModel
from kvxfer.scheduler.scoring import Scorer
from kvxfer.scheduler.simulator.tally import Window
from kvxfer.scheduler.simulator.workers import DecodeWorker, PrefillWorker, Worker

T = TypeVar("T")

MODEL: Final = "simulated"
# Only the size of a block matters here, and that all have the same layout.
LAYOUT: Final = KvLayout(
    num_layers=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=BLOCK_TOKENS
)
# No worker dies here, and heartbeats that say nothing new are left out.
_LEASE_SECONDS: Final = 1e12
_DRAIN_SECONDS: Final = 3600.0

# (time, order, callback, its argument)
_Event: TypeAlias = tuple[float, int, Callable[[Any], None], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The settings of a fleet that do not depend on its load."""

    model: WorkerModel
    scorer: Scorer | None = None
    heartbeat_seconds: float = 2.0
    capacity_seconds: float = 5.0
    """The time that a request waits for a pair, as `kvxfer router --capacity-seconds`."""
    first_token_seconds: float = 30.0
    """The time that a request waits for a token, as `kvxfer router --first-token-seconds`."""
    ttft_target: float = 1.0
    itl_target: float = 0.05
    rack_size: int | None = None
    """Instances per rack; None puts all in one place."""
    tokens_per_hash: int | None = None
    metered: bool = False
    """Whether workers report rates and latencies, as the autoscaler needs them."""
    seed: int = 0


def immediately(step: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a step that does not wait, as those of the embedded registry."""
    try:
        step.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    step.close()
    raise RuntimeError("a step of the registry waited for something")


class Members:
    """The workers of a fleet, and a clock of simulated seconds. One thread."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.model = settings.model
        self.now = 0.0
        self.registry = EmbeddedRegistry(
            LeasePolicy(lease_seconds=_LEASE_SECONDS), clock=self, scorer=settings.scorer
        )
        self.prefill: dict[str, PrefillWorker] = {}
        self.decode: dict[str, DecodeWorker] = {}
        self.gone_seconds = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        """Seconds of the workers that have left, from registered to gone."""
        self.window: Window | None = None
        """The window that counts what happens now."""
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._draw = random.Random(settings.seed)  # noqa: S311 (no secret)

    # --- time --------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.run(self.now + seconds)

    def after(self, seconds: float, what: Callable[[Any], None], with_: Any = None) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, with_))

    def run(self, until: float) -> None:
        """Runs all events up to a moment."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, with_ = heapq.heappop(events)
            what(with_)
        self.now = max(self.now, until)

    # --- workers -----------------------------------------------------------------------------

    def add(self, role: Role, *, ready: bool = True) -> Worker:
        """Registers a worker."""
        number = next(self._names)
        name = f"{role}-{number:06}"
        labels = {}
        if self.settings.rack_size is not None:
            rack = number // self.settings.rack_size
            labels = {"zone": "zone", "rack": f"rack-{rack:05}", "host": f"host-{number:06}"}
        spec = InstanceSpec(
            instance_id=name,
            role=role,
            model=MODEL,
            engine_address="",
            http_address="",
            layout=LAYOUT,
            num_blocks=self.model.kv_blocks,
            fabrics=("verbs",),
            labels=labels,
        )
        epoch = immediately(self.registry.register(spec)).epoch
        worker: Worker
        if role is Role.PREFILL:
            worker = self.prefill[name] = PrefillWorker(name, epoch, self.model, self.now)
        else:
            worker = self.decode[name] = DecodeWorker(name, epoch, self.model, self.now)
        worker.phase = self._draw.random()
        if self.settings.metered:
            worker.meter = LoadMeter(clock=self)
        if ready:
            self.make_ready(worker)
        return worker

    def make_ready(self, worker: Worker) -> None:
        if worker.name in self.prefill or worker.name in self.decode:
            worker.ready = True
            worker.stood_since = self.now
            immediately(
                self.registry.heartbeat(worker.name, worker.epoch, state=InstanceState.READY)
            )
            self.changed(worker)

    def take_away(self, role: Role, count: int) -> None:
        """Takes workers away once they are idle. Those that are not ready yet go first, then the
        least busy ones."""
        workers: dict[str, Any] = self.prefill if role is Role.PREFILL else self.decode
        staying = [worker for worker in workers.values() if not worker.draining]
        staying.sort(key=lambda w: (w.ready, sum(w.load) + w.incoming, w.name))
        for worker in staying[:count]:
            worker.draining = True
            immediately(self.registry.drain(worker.name, seconds=_DRAIN_SECONDS))
            self.leave_if_done(worker)

    def count(self, role: Role) -> int:
        """Returns the number of workers that are to stay."""
        workers = self.prefill if role is Role.PREFILL else self.decode
        return sum(not worker.draining for worker in workers.values())

    def worker_seconds(self, role: Role) -> float:
        workers = self.prefill if role is Role.PREFILL else self.decode
        here = sum(self.now - worker.registered for worker in workers.values())
        return self.gone_seconds[role] + here

    def leave_if_done(self, worker: Worker) -> None:
        gone = worker.name not in self.prefill and worker.name not in self.decode
        if gone or not worker.draining or not worker.idle:
            return
        immediately(self.registry.deregister(worker.name, worker.epoch))
        stood = worker.stood(self.now)
        if isinstance(worker, PrefillWorker):
            del self.prefill[worker.name]
            self.gone_seconds[Role.PREFILL] += self.now - worker.registered
            if self.window is not None:
                self.window.prefill_seconds += stood
                self.window.prefill_busy += worker.computed(self.now)
        else:
            del self.decode[worker.name]
            self.gone_seconds[Role.DECODE] += self.now - worker.registered
            if self.window is not None:
                self.window.decode_seconds += stood

    # --- heartbeats --------------------------------------------------------------------------

    def changed(self, worker: Worker) -> None:
        """Schedules the worker's next heartbeat, which reports the change."""
        if not worker.beating:
            worker.beating = True
            every = self.settings.heartbeat_seconds
            phase = worker.registered + worker.phase * every
            # One more than the last one in any case: a quotient may be rounded down.
            worker.beats = max(math.floor((self.now - phase) / every), worker.beats) + 1
            self.after(phase + worker.beats * every - self.now, self._beat, worker)

    def _beat(self, worker: Worker) -> None:
        worker.beating = False
        if worker.name not in self.prefill and worker.name not in self.decode:
            return
        self.report(worker)
        # Rates keep changing while nothing arrives, until they are 0.
        if worker.meter is not None and worker.meter.requests_per_second:
            self.changed(worker)

    def report(self, worker: Worker) -> None:
        """Sends a heartbeat now."""
        running, waiting = worker.load
        meter = worker.meter
        free = None
        if isinstance(worker, DecodeWorker):
            free = max(worker.model.kv_blocks - math.ceil(worker.held), 0)
        if meter is None:
            load = Load(running=running, waiting=waiting, free_blocks=free)
        else:
            load = Load(
                running=running,
                waiting=waiting,
                free_blocks=free,
                requests_per_second=meter.requests_per_second,
                tokens_per_second=meter.tokens_per_second,
                ttft_p90=meter.ttft_p90,
                itl_p90=meter.itl_p90,
            )
        immediately(self.registry.heartbeat(worker.name, worker.epoch, load=load))
        if isinstance(worker, PrefillWorker) and (update := worker.published.take(worker.epoch)):
            told = immediately(self.registry.publish_blocks(worker.name, worker.epoch, update))
            worker.published.kept(told.capacity)
