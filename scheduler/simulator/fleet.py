"""The fleet of a simulation: the real registry and pairing, workers on paper, virtual time.

An event per stage of a request (its prompt is computed, its cache is at decode, its last token),
none per token. Workers say what they have with heartbeats, so pairing knows as little as it does in
a cluster; a heartbeat that would say what the last one said is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from kvxfer.errors import NoCapacity, PromptTooLong, UnknownTransfer
from kvxfer.instances import InstanceSpec, InstanceState, Load, Role
from kvxfer.kv.layout import KvLayout
from kvxfer.load_meter import LoadMeter
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.registry import LeasePolicy
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS, WorkerModel
from kvxfer.scheduler.scoring import Scorer
from kvxfer.scheduler.simulator.tally import Window
from kvxfer.scheduler.simulator.workers import DecodeWorker, PrefillWorker, Request, Worker
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest

T = TypeVar("T")

_MODEL: Final = "simulated"
# The parts of a layout that matter here are the size of a block and that all have the same.
_LAYOUT: Final = KvLayout(
    num_layers=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=BLOCK_TOKENS
)
# A router asks again after up to 0.2 s, this long on average.
_RETRY_SECONDS: Final = 0.1
_NO_END: Final = 1e12
_TRANSFER_SECONDS: Final = 60.0
_DRAIN_SECONDS: Final = 3600.0

# (time, order, what to do, with what)
_Event: TypeAlias = tuple[float, int, Callable[[Any], None], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What of a fleet does not depend on its load."""

    model: WorkerModel
    scorer: Scorer | None = None
    heartbeat_seconds: float = 2.0
    capacity_seconds: float = 5.0
    """How long a request waits for a pair, as `kvxfer router --capacity-seconds`."""
    first_token_seconds: float = 30.0
    """When a request without a token is given up, as `kvxfer router --first-token-seconds`."""
    ttft_target: float = 1.0
    itl_target: float = 0.05
    rack_size: int | None = None
    """Instances per rack; None puts all in one place."""
    tokens_per_hash: int | None = None
    metered: bool = False
    """Whether workers report rates and latencies, as the autoscaler needs them."""
    seed: int = 0


def immediately(step: Coroutine[Any, Any, T]) -> T:
    """The result of a step that waits for nobody, as those of the embedded registry."""
    try:
        step.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    step.close()
    raise RuntimeError("a step of the registry waited for something")


class SimulatedFleet:
    """Its own clock: seconds of simulated time. Belongs to one thread."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.model = settings.model
        self.now = 0.0
        self.registry = EmbeddedRegistry(
            LeasePolicy(lease_seconds=_NO_END), clock=self, scorer=settings.scorer
        )
        self.prefill: dict[str, PrefillWorker] = {}
        self.decode: dict[str, DecodeWorker] = {}
        self.windows: list[Window] = []
        self.gone_seconds = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        """Of workers that have left, from registered to gone."""
        self._window: Window | None = None
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._waiting: deque[Request] = deque()
        self._asking = False
        self._under_way = 0
        """Requests that have not come to their end."""
        self._draw = random.Random(settings.seed)  # noqa: S311 (no secret)
        self._spare = [0.0] * (self.model.batch + 2)
        """For what belongs to no window."""
        self._layer_part = 1 / _LAYOUT.num_layers

    # --- time --------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now

    def after(self, seconds: float, what: Callable[[Any], None], with_: Any = None) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, with_))

    def run(self, until: float) -> None:
        """Everything that happens up to a moment."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, with_ = heapq.heappop(events)
            what(with_)
        self.now = max(self.now, until)

    def serve(self, requests: Iterable[Request], until: float) -> None:
        """`run` while these requests arrive."""
        for request in requests:
            self.run(request.arrived)
            self.arrive(request)
        self.run(until)

    def finish(self, *, at_most: float) -> None:
        """Lets all requests come to their end, as far as they do within so many seconds."""
        until = self.now + at_most
        while self._under_way and self._events and self._events[0][0] <= until:
            self.run(self._events[0][0])

    def open_window(self, window: Window) -> None:
        self.close_window()
        window.seconds_in_batch = [0.0] * (self.model.batch + 2)
        self.windows.append(window)
        self._window = window
        window.prefill_workers = sum(w.ready and not w.draining for w in self.prefill.values())
        window.decode_workers = sum(w.ready and not w.draining for w in self.decode.values())

    def close_window(self) -> None:
        """Counts what is under way into the window that ends now."""
        if self._window is not None:
            for worker in self.decode.values():
                worker.advance(self.now, self._window.seconds_in_batch)
                self._window.decode_seconds += worker.stood(self.now)
            for prefill in self.prefill.values():
                self._window.prefill_seconds += prefill.stood(self.now)
                self._window.prefill_busy += prefill.computed(self.now)
        self._window = None

    # --- workers -----------------------------------------------------------------------------

    def add(self, role: Role, *, ready: bool = True) -> Worker:
        """A worker registers."""
        number = next(self._names)
        name = f"{role}-{number:06}"
        labels = {}
        if self.settings.rack_size is not None:
            rack = number // self.settings.rack_size
            labels = {"zone": "zone", "rack": f"rack-{rack:05}", "host": f"host-{number:06}"}
        spec = InstanceSpec(
            instance_id=name,
            role=role,
            model=_MODEL,
            engine_address="",
            http_address="",
            layout=_LAYOUT,
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
            worker.meter = LoadMeter(clock=self.monotonic)
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
            self._changed(worker)

    def take_away(self, role: Role, count: int) -> None:
        """Those that are not ready yet go first, then the least busy ones, once they are idle."""
        workers: dict[str, Any] = self.prefill if role is Role.PREFILL else self.decode
        staying = [worker for worker in workers.values() if not worker.draining]
        staying.sort(key=lambda w: (w.ready, sum(w.load) + w.incoming, w.name))
        for worker in staying[:count]:
            worker.draining = True
            immediately(self.registry.drain(worker.name, seconds=_DRAIN_SECONDS))
            self._leave_if_done(worker)

    def count(self, role: Role) -> int:
        """Workers that are to stay."""
        workers = self.prefill if role is Role.PREFILL else self.decode
        return sum(not worker.draining for worker in workers.values())

    def worker_seconds(self, role: Role) -> float:
        workers = self.prefill if role is Role.PREFILL else self.decode
        here = sum(self.now - worker.registered for worker in workers.values())
        return self.gone_seconds[role] + here

    def _leave_if_done(self, worker: Worker) -> None:
        if not worker.draining or not worker.idle:
            return
        immediately(self.registry.deregister(worker.name, worker.epoch))
        stood = worker.stood(self.now)
        if isinstance(worker, PrefillWorker):
            del self.prefill[worker.name]
            self.gone_seconds[Role.PREFILL] += self.now - worker.registered
            if self._window is not None:
                self._window.prefill_seconds += stood
                self._window.prefill_busy += worker.computed(self.now)
        else:
            del self.decode[worker.name]
            self.gone_seconds[Role.DECODE] += self.now - worker.registered
            if self._window is not None:
                self._window.decode_seconds += stood

    # --- heartbeats --------------------------------------------------------------------------

    def _changed(self, worker: Worker) -> None:
        """Its next heartbeat will say so."""
        if not worker.beating:
            worker.beating = True
            every = self.settings.heartbeat_seconds
            phase = worker.registered + worker.phase * every
            beats = math.floor((self.now - phase) / every) + 1
            self.after(phase + beats * every - self.now, self._beat, worker)

    def _beat(self, worker: Worker) -> None:
        worker.beating = False
        if worker.name not in self.prefill and worker.name not in self.decode:
            return
        self.report(worker)
        # Rates go on changing while nothing arrives, until they are nothing.
        if worker.meter is not None and worker.meter.requests_per_second:
            self._changed(worker)

    def report(self, worker: Worker) -> None:
        """A heartbeat of this moment."""
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
            immediately(self.registry.publish_blocks(worker.name, worker.epoch, update))

    # --- requests ----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self._under_way += 1
        if request.counted and self._window is not None:
            self._window.arrived += 1
        if self._waiting or not self._pair(request):
            self._waiting.append(request)
            self._ask_later()

    def _ask_later(self) -> None:
        if not self._asking:
            self._asking = True
            self.after(_RETRY_SECONDS, self._ask_again)

    def _ask_again(self, _: None) -> None:
        """For those that have no pair, the first one first, until one gets none."""
        self._asking = False
        while self._waiting:
            request = self._waiting[0]
            if self.now - request.arrived > self.settings.capacity_seconds:
                self._refuse(self._waiting.popleft())
            elif self._pair(request):
                self._waiting.popleft()
            else:
                self._ask_later()
                return

    def _refuse(self, request: Request) -> None:
        self._under_way -= 1
        if request.counted:
            self.windows[request.window].refused += 1

    def _pair(self, request: Request) -> bool:
        """Whether it is done with: it has a pair, or there never is one."""
        settings = self.settings
        hashes = request.hashes
        asked = TransferRequest(
            model=_MODEL,
            prompt_tokens=request.prompt,
            prefix_hashes=hashes,
            tokens_per_hash=settings.tokens_per_hash if hashes else None,
        )
        try:
            request.transfer = transfer = immediately(
                open_transfer(self.registry, asked, seconds=_TRANSFER_SECONDS, clock=self)
            )
        except PromptTooLong:
            self._refuse(request)
            return True
        except NoCapacity:
            return False
        prefill = self.prefill[transfer.prefill.instance_id]
        self.decode[transfer.decode.instance_id].incoming += 1
        if prefill.meter is not None:
            prefill.meter.request(request.prompt)
        if prefill.current is None:
            self._compute(prefill, request)
        else:
            prefill.queue.append(request)
        self._changed(prefill)
        return True

    def _compute(self, worker: PrefillWorker, request: Request) -> None:
        worker.current = request
        request.started = self.now
        prompt, cached = request.prompt, 0
        if request.hashes:
            per_hash = self.settings.tokens_per_hash or BLOCK_TOKENS
            # The last token is computed in any case: its logits are the answer's beginning.
            cached = min(worker.cached(request.hashes) * per_hash, prompt - 1)
            worker.evict(worker.model.kv_blocks * BLOCK_TOKENS // per_hash)
        if request.counted:
            window = self.windows[request.window]
            window.prompt += prompt
            window.cached += cached
        seconds = worker.model.prefill_seconds(prompt - cached)
        worker.began(self.now, seconds)
        self.after(seconds, self._computed, worker)

    def _computed(self, worker: PrefillWorker) -> None:
        request = worker.current
        assert request is not None
        assert request.transfer is not None
        decode = self.decode[request.transfer.decode.instance_id]
        self.after(self._transfer(worker, decode, request) - self.now, self._arrived, request)
        worker.current = None
        while worker.queue and worker.current is None:
            following = worker.queue.popleft()
            if self.now - following.arrived > self.settings.first_token_seconds:
                self._give_up(following)
            else:
                self._compute(worker, following)
        self._changed(worker)
        if worker.draining:
            self._leave_if_done(worker)

    def _transfer(self, prefill: PrefillWorker, decode: DecodeWorker, request: Request) -> float:
        """When the whole cache is at decode. Layers travel while later ones are computed, so what
        is left then is the last layer, unless the network is slower than prefill or still busy
        with earlier requests of either side."""
        model = self.model
        per_second = model.nics * model.nic_gb_per_second * 1e9
        seconds = request.prompt * model.kv_bytes_per_token / per_second
        begun = max(request.started, prefill.network_free, decode.network_free)
        done = max(self.now + seconds * self._layer_part, begun + seconds)
        prefill.network_free = decode.network_free = done
        return done

    def _arrived(self, request: Request) -> None:
        """Its cache is at decode."""
        assert request.transfer is not None
        worker = self.decode[request.transfer.decode.instance_id]
        if self.now - request.arrived > self.settings.first_token_seconds:
            self._give_up(request)
            return
        worker.incoming -= 1
        self.join(worker, request)

    def join(self, worker: DecodeWorker, request: Request) -> None:
        request.first_wait = self.now
        worker.queue.append(request)
        self._advance(worker)

    def _advance(self, worker: DecodeWorker) -> None:
        """Whoever has its last token leaves, whoever fits begins."""
        window = self._window
        worker.advance(self.now, self._spare if window is None else window.seconds_in_batch)
        for request in worker.leave():
            self._finished(worker, request)
        for request in worker.admit(self.now):
            self._begun(worker, request)
        due = worker.next_due()
        if due < worker.due:
            worker.due = due
            self.after(due - self.now, self._due, worker)
        self._changed(worker)
        if worker.draining:
            self._leave_if_done(worker)

    def _due(self, worker: DecodeWorker) -> None:
        if worker.due <= self.now:  # else one that came later is done sooner
            worker.due = math.inf
            self._advance(worker)

    def _begun(self, worker: DecodeWorker, request: Request) -> None:
        """From here on decode's own load counts it."""
        self._release(request)
        ttft = request.first_token - request.arrived
        meter = worker.meter
        if meter is not None:
            meter.request()
            meter.first_token(ttft)
        if not request.counted:
            return
        window = self.windows[request.window]
        window.ttft.append(ttft)
        waited = request.started - request.arrived
        window.prefill_wait += waited
        window.prefill_waited += waited > 0
        waited = self.now - request.first_wait
        window.decode_wait += waited
        window.decode_waited += waited > 0

    def _finished(self, worker: DecodeWorker, request: Request) -> None:
        self._under_way -= 1
        took = self.now - request.joined
        itl = took / request.output
        if worker.meter is not None:
            worker.meter.tokens(round(request.output))
            worker.meter.next_tokens(itl)
        if not request.counted:
            return
        window, settings = self.windows[request.window], self.settings
        window.finished += 1
        in_time = request.first_token - request.arrived <= settings.ttft_target
        window.good += in_time and itl <= settings.itl_target

    def _give_up(self, request: Request) -> None:
        """It has waited too long for its first token."""
        assert request.transfer is not None
        decode = self.decode[request.transfer.decode.instance_id]
        decode.incoming -= 1
        self._under_way -= 1
        self._release(request)
        if request.counted:
            self.windows[request.window].late += 1
        if decode.draining:
            self._leave_if_done(decode)

    def _release(self, request: Request) -> None:
        if request.transfer is not None:
            with suppress(UnknownTransfer):  # a reservation ends with its ticket
                immediately(self.registry.release(request.transfer.transfer_id))
            request.transfer = None

    # --- what comes and goes otherwise -------------------------------------------------------

    def begin_decoding(self, requests: Iterable[Request]) -> None:
        """Pairing finds places for requests whose cache is at decode already."""
        placed = []
        for request in requests:
            asked = TransferRequest(model=_MODEL, prompt_tokens=request.prompt)
            try:
                request.transfer = immediately(
                    open_transfer(self.registry, asked, seconds=_TRANSFER_SECONDS, clock=self)
                )
            except (NoCapacity, PromptTooLong):
                break
            placed.append((self.decode[request.transfer.decode.instance_id], request))
        touched = {}
        for worker, request in placed:
            self._under_way += 1
            request.started = self.now
            touched[worker.name] = worker
            self.join(worker, request)
            self._release(request)
        for worker in touched.values():
            self.report(worker)

    def drop(self, worker: DecodeWorker, places: list[int]) -> None:
        """Requests leave, by their places in the batch."""
        worker.advance(self.now, self._spare)
        worker.drop(places)
        self._under_way -= len(places)
        self._advance(worker)
        if worker.name in self.decode:
            self.report(worker)

    def withdraw(self, worker: PrefillWorker) -> None:
        """The last request of a queue leaves."""
        request = worker.queue.pop()
        assert request.transfer is not None
        decode = self.decode[request.transfer.decode.instance_id]
        decode.incoming -= 1
        self._under_way -= 1
        self._release(request)
        self._changed(worker)
        if decode.draining:
            self._leave_if_done(decode)
