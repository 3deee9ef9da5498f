"""A fleet on paper: a model of what workers of a known speed make of a load. Replays use it, and
`kvxfer simulate` uses it between the windows that it simulates.

A fluid model in steps of one second, meant to exercise decisions and not to predict an engine:

- A prefill worker computes `prefill_tokens_per_second`, one prompt after the other. What does not
  fit queues. TTFT is the time to work the queue off, plus the prompt's own time, plus the 90th
  percentile of the M/D/1 wait at the utilisation of the moment.
- A decode worker takes `itl_base + itl_per_request x batch` seconds per token. A request stays for
  its output tokens, and holds KV blocks for its prompt and half its output. What does not fit into
  the KV cache waits.
- A worker is ready `start_seconds` after it was asked for. One that is taken away leaves at once,
  and the others take over its requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from kvxfer.scheduler.scaling.measurements import Measurements, RoleMeasurement
from kvxfer.scheduler.scaling.trace import Load
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS, WorkerModel

# Above this the M/D/1 wait is that of a queue, which is counted by itself.
_MOST_UTILISATION: Final = 0.95
# Workers report what they emit as a mean over about a minute.
_RATE_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Workers:
    """The workers of one role: the ready ones, and the times at which the others will be ready."""

    ready: int
    coming: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.ready + len(self.coming)

    def resize(self, wanted: int, ready_at: float) -> None:
        while self.count < wanted:
            self.coming.append(ready_at)
        while self.count > wanted:
            if self.coming:
                self.coming.pop()
            else:
                self.ready -= 1

    def advance(self, now: float) -> None:
        self.ready += sum(at <= now for at in self.coming)
        self.coming = [at for at in self.coming if at > now]


@dataclass(frozen=True, slots=True)
class PaperState:
    """The state of a fleet at one moment."""

    prefill: int
    """Ready workers."""
    decode: int
    queued_tokens: float
    """Tokens of prompts that are not computed yet."""
    decoding: float
    """Requests at decode, those that wait there included. Those that end in the last second count,
    as they emit tokens in it."""


class PaperFleet:
    """Workers, queues and latencies at one moment of a replay. It begins idle."""

    def __init__(self, model: WorkerModel, *, prefill: int, decode: int) -> None:
        self._model = model
        self._prefill, self._decode = _Workers(prefill), _Workers(decode)
        self._load = Load(0.0, 1.0, 1.0)
        self._queued_tokens = 0.0
        self._decoding = self._emitting = 0.0
        self._evenness = 1.0
        self._output_rate = 0.0
        self.ttft = 0.0
        self.itl = model.itl_base

    def resize(self, prefill: int, decode: int, *, now: float) -> None:
        ready_at = now + self._model.start_seconds
        self._prefill.resize(prefill, ready_at)
        self._decode.resize(decode, ready_at)

    @property
    def state(self) -> PaperState:
        return PaperState(
            self._prefill.ready, self._decode.ready, self._queued_tokens, self._emitting
        )

    def resume(self, queued_tokens: float, decoding: float, evenness: float = 1.0) -> None:
        """Continues from a state seen elsewhere. `evenness` is the output of batches of different
        sizes, as a part of what it would be if they were all alike."""
        self._evenness = evenness
        self._queued_tokens, self._decoding = queued_tokens, decoding
        self._emit(self._load)

    def give_up(self, queued_tokens: float) -> None:
        """Drops the queued tokens beyond `queued_tokens`."""
        self._queued_tokens = min(self._queued_tokens, queued_tokens)

    def advance(self, now: float, load: Load) -> None:
        """Lets one second of `load` pass, up to `now`."""
        self._load = load
        self._prefill.advance(now)
        self._decode.advance(now)
        begun = self._advance_prefill(load)
        self._advance_decode(load, begun)

    def _advance_prefill(self, load: Load) -> float:
        """Returns the requests that went on to decode."""
        alone = self._model.prefill_seconds(load.prompt_tokens)
        capacity = self._prefill.ready * load.prompt_tokens / alone
        arrived = load.requests_per_second * load.prompt_tokens
        self._queued_tokens += arrived
        computed = min(self._queued_tokens, capacity)
        self._queued_tokens -= computed
        used = min(arrived / capacity, _MOST_UTILISATION)
        wait = math.log(10) * used * alone / (2 * (1 - used))
        self.ttft = self._queued_tokens / capacity + alone + wait
        return computed / load.prompt_tokens

    def _advance_decode(self, load: Load, begun: float) -> None:
        self._decoding += begun
        self._emit(load)

    def _emit(self, load: Load) -> None:
        """Emits the tokens of one second."""
        self._emitting = self._decoding
        batch = min(self._decoding, self._decode_slots()) / self._decode.ready
        self.itl = self._model.itl(batch)
        emitted = batch * self._decode.ready / self.itl * self._evenness
        self._output_rate += (emitted - self._output_rate) / _RATE_SECONDS
        self._decoding -= min(emitted / load.output_tokens, self._decoding)

    def _decode_slots(self) -> float:
        in_cache = self._model.kv_blocks * BLOCK_TOKENS / self._tokens_held()
        return self._decode.ready * min(in_cache, self._model.batch)

    def _tokens_held(self) -> float:
        return self._load.prompt_tokens + self._load.output_tokens / 2

    def measurements(self, at: float) -> Measurements:
        """Returns what workers and registry would report at this moment."""
        load, model = self._load, self._model
        queued = self._queued_tokens / load.prompt_tokens
        computing = min(queued, self._prefill.ready)
        slots = self._decode_slots()
        held = BLOCK_TOKENS / self._tokens_held()
        decoding = min(self._decoding, slots)
        return Measurements(
            at=at,
            prefill=RoleMeasurement(
                ready=self._prefill.ready,
                joining=len(self._prefill.coming),
                requested=self._prefill.count,
                running=round(computing),
                waiting=round(queued - computing),
                backlog=round(queued),
                blocks=self._prefill.ready * model.kv_blocks,
                used_blocks=round(computing * load.prompt_tokens / BLOCK_TOKENS),
                requests_per_second=load.requests_per_second,
                tokens_per_second=load.requests_per_second * load.prompt_tokens,
                latency=self.ttft,
            ),
            decode=RoleMeasurement(
                ready=self._decode.ready,
                joining=len(self._decode.coming),
                requested=self._decode.count,
                running=round(decoding),
                waiting=round(self._decoding - decoding),
                backlog=0,  # on paper a transfer takes no time
                blocks=self._decode.ready * model.kv_blocks,
                used_blocks=round(decoding / held),
                requests_per_second=load.requests_per_second,
                tokens_per_second=self._output_rate,
                latency=self.itl if self._decoding > 0 else None,
            ),
        )
