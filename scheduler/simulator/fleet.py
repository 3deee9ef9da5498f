"""The fleet of a simulation: each request passes through the real pairing and workers on paper.

An event per stage of a request (its prompt is computed, its cache is at decode, its last token),
none per token. Workers report with heartbeats, so pairing knows as little as in a cluster; a
heartbeat that would repeat the last one is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from kvxfer.errors import NoCapacity, PromptTooLong, UnknownTransfer
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS
from kvxfer.scheduler.simulator.members import LAYOUT, MODEL, FleetSettings, Members, immediately
from kvxfer.scheduler.simulator.tally import Window
from kvxfer.scheduler.simulator.workers import DecodeWorker, PrefillWorker, Request
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest

# A router asks again after up to 0.2 s, this long on average.
_RETRY_SECONDS: Final = 0.1
# The default of `kvxfer serve --transfer-seconds`.
_TRANSFER_SECONDS: Final = 60.0
_LAYER_PART: Final = 1 / LAYOUT.num_layers


class SimulatedFleet(Members):
    """The members that serve requests, and the counts of a run."""

    def __init__(self, settings: FleetSettings) -> None:
        super().__init__(settings)
        self.windows: list[Window] = []
        self._waiting: deque[Request] = deque()
        self._asking = False
        self._under_way = 0
        """Requests that have not ended."""
        self._spare = [0.0] * (self.model.batch + 2)
        """Seconds in batches outside any window."""

    def serve(self, requests: Iterable[Request], until: float) -> None:
        """Runs up to `until` while these requests arrive."""
        for request in requests:
            self.run(request.arrived)
            self.arrive(request)
        self.run(until)

    def finish(self, *, at_most: float) -> None:
        """Runs until all requests have ended, for at most `at_most` seconds."""
        until = self.now + at_most
        while self._under_way and self._events and self._events[0][0] <= until:
            self.run(self._events[0][0])

    def open_window(self, window: Window) -> None:
        self.close_window()
        window.seconds_in_batch = [0.0] * (self.model.batch + 2)
        self.windows.append(window)
        self.window = window
        window.prefill_workers = sum(w.ready and not w.draining for w in self.prefill.values())
        window.decode_workers = sum(w.ready and not w.draining for w in self.decode.values())

    def close_window(self) -> None:
        """Counts what is under way into the window that ends now."""
        if self.window is not None:
            for worker in self.decode.values():
                worker.advance(self.now, self.window.seconds_in_batch)
                self.window.decode_seconds += worker.stood(self.now)
            for prefill in self.prefill.values():
                self.window.prefill_seconds += prefill.stood(self.now)
                self.window.prefill_busy += prefill.computed(self.now)
        self.window = None

    # --- requests ----------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self._under_way += 1
        if request.counted and self.window is not None:
            self.window.arrived += 1
        if self._waiting or not self._pair(request):
            self._waiting.append(request)
            self._ask_later()

    def _ask_later(self) -> None:
        if not self._asking:
            self._asking = True
            self.after(_RETRY_SECONDS, self._ask_again)

    def _ask_again(self, _: None) -> None:
        """Asks again for the requests without a pair, in order, until one gets none."""
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
        """Pairs a request. Returns whether it is settled: it has a pair, or never will."""
        settings = self.settings
        hashes = request.hashes
        asked = TransferRequest(
            model=MODEL,
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
        prefill = request.prefill = self.prefill[transfer.prefill.instance_id]
        request.decode = self.decode[transfer.decode.instance_id]
        request.decode.incoming += 1
        if prefill.meter is not None:
            prefill.meter.requests(1)
            prefill.meter.tokens(request.prompt)
        if prefill.current is None:
            self._compute(prefill, request)
        else:
            prefill.queue.append(request)
        self.changed(prefill)
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
        self.after(seconds, self._computed, request)

    def _computed(self, request: Request) -> None:
        worker = request.prefill
        self.after(self._transfer(request) - self.now, self._arrived, request)
        worker.current = None
        while worker.queue and worker.current is None:
            following = worker.queue.popleft()
            if self.now - following.arrived > self.settings.first_token_seconds:
                self._give_up(following)
            else:
                self._compute(worker, following)
        self.changed(worker)
        if worker.draining:
            self.leave_if_done(worker)

    def _transfer(self, request: Request) -> float:
        """Returns the time when the whole cache is at decode. Layers travel while later ones are
        computed, so only the last layer is left then, unless the network is slower than prefill or
        still busy with earlier requests of either side."""
        model, prefill, decode = self.model, request.prefill, request.decode
        per_second = model.nics * model.nic_gb_per_second * 1e9
        seconds = request.prompt * model.kv_bytes_per_token / per_second
        begun = max(request.started, prefill.network_free, decode.network_free)
        done = max(self.now + seconds * _LAYER_PART, begun + seconds)
        prefill.network_free = decode.network_free = done
        return done

    def _arrived(self, request: Request) -> None:
        """Queues a request at decode, where its cache has arrived."""
        worker = request.decode
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
        """Removes requests that have their last token, and begins those that fit."""
        window = self.window
        worker.advance(self.now, self._spare if window is None else window.seconds_in_batch)
        for request in worker.leave():
            self._finished(worker, request)
        for request in worker.admit(self.now):
            self._begun(worker, request)
        due = worker.next_due()
        if due < worker.due:
            worker.due = due
            self.after(due - self.now, self._due, worker)
        self.changed(worker)
        if worker.draining:
            self.leave_if_done(worker)

    def _due(self, worker: DecodeWorker) -> None:
        if worker.due <= self.now:  # else an earlier event took its place
            worker.due = math.inf
            self._advance(worker)

    def _begun(self, worker: DecodeWorker, request: Request) -> None:
        """Begins a request at decode, whose own load counts it from here on."""
        self._release(request)
        ttft = request.first_token - request.arrived
        meter = worker.meter
        if meter is not None:
            meter.requests(1)
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
        """Gives up a request that has waited too long for its first token."""
        decode = request.decode
        decode.incoming -= 1
        self._under_way -= 1
        self._release(request)
        if request.counted:
            self.windows[request.window].late += 1
        if decode.draining:
            self.leave_if_done(decode)

    def _release(self, request: Request) -> None:
        if request.transfer is not None:
            with suppress(UnknownTransfer):  # a reservation ends with its ticket
                immediately(self.registry.release(request.transfer.transfer_id))
            request.transfer = None

    # --- changes between windows -------------------------------------------------------------

    def begin_decoding(self, requests: Iterable[Request]) -> None:
        """Begins requests whose cache is at decode already, at places that pairing finds."""
        placed = []
        for request in requests:
            asked = TransferRequest(model=MODEL, prompt_tokens=request.prompt)
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
        """Drops requests by their places in the batch."""
        worker.advance(self.now, self._spare)
        worker.drop(places)
        self._under_way -= len(places)
        self._advance(worker)
        if worker.name in self.decode:
            self.report(worker)

    def withdraw(self, worker: PrefillWorker) -> None:
        """Withdraws the last request of a queue."""
        request = worker.queue.pop()
        decode = request.decode
        decode.incoming -= 1
        self._under_way -= 1
        self._release(request)
        self.changed(worker)
        if decode.draining:
            self.leave_if_done(decode)
