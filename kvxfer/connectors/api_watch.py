"""The latencies of an engine and the names that it serves, which only its API process knows."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import httpx2

from kvxfer.clock import Clock

logger = logging.getLogger(__name__)

_EVERY_SECONDS: Final = 5.0
_WINDOW_SECONDS: Final = 60.0
_TIMEOUT_SECONDS: Final = 2.0
# Consecutive failures before a warning.
_FAILURES_TOLD: Final = 12
_TTFT: Final = "time_to_first_token_seconds"
_ITL: Final = "inter_token_latency_seconds"

_Histogram = dict[float, float]
"""The number of observations of at most each bound, in seconds."""


EngineName: TypeAlias = Literal["vllm", "sglang"]


def engine_api(
    http_address: str, engine: EngineName, *, transport: httpx2.AsyncBaseTransport | None = None
) -> httpx2.AsyncClient:
    """Returns a client of the own engine's API, with its API key if the environment has one."""
    key = os.environ.get(_key_variable(engine))
    return httpx2.AsyncClient(
        base_url=http_address,
        timeout=_TIMEOUT_SECONDS,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        transport=transport,
        trust_env=False,
    )


def _key_variable(engine: EngineName) -> str:
    return f"{engine.upper()}_API_KEY"


class ApiWatch:
    """A watcher that asks the API of an instance every five seconds. One event loop."""

    def __init__(
        self,
        http_address: str,
        model: str,
        *,
        engine: EngineName,
        clock: Clock,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`model` is the name of the instance's model. If the API requires a key, VLLM_API_KEY or
        SGLANG_API_KEY has it."""
        self.models: tuple[str, ...] = ()
        """Names that the instance serves beside `model`: aliases and loaded adapters."""
        self._model = model
        self._clock = clock
        self._seen: deque[tuple[float, Mapping[str, _Histogram]]] = deque()
        self._buckets = re.compile(
            rf'^{engine}:({_TTFT}|{_ITL})_bucket{{[^}}]*le="([^"]+)"[^}}]*}} (\S+)$', re.MULTILINE
        )
        self._key = _key_variable(engine)
        self._http = engine_api(http_address, engine, transport=transport)
        self._told = False
        self._failures = 0

    @property
    def ttft_p90(self) -> float | None:
        """The 90th percentile of the seconds to the first token, over the last minute."""
        return self._p90(_TTFT)

    @property
    def itl_p90(self) -> float | None:
        """The 90th percentile of the seconds between two tokens, over the last minute."""
        return self._p90(_ITL)

    async def run(self) -> None:
        """Asks the API until cancelled."""
        async with self._http:
            while True:
                try:
                    await self.look()
                except (httpx2.HTTPError, ValueError) as error:
                    self._failed(error)
                else:
                    self._failures = 0
                await asyncio.sleep(_EVERY_SECONDS)

    async def look(self) -> None:
        """Asks once. Raises httpx2.HTTPError, or ValueError for an answer that cannot be read."""
        metrics = await self._http.get("/metrics")
        if metrics.is_success:
            self._take(metrics.text)
        models = await self._http.get("/v1/models")
        if models.is_success:
            self.models = self._names(models.json())
        elif not self._told:
            self._told = True
            logger.warning(
                "adapters and aliases of this instance are unknown: /v1/models answers %d; "
                "set %s to the API key",
                models.status_code,
                self._key,
            )

    def _failed(self, error: Exception) -> None:
        """Warns once the API has not answered for a minute; it may take as long to start."""
        self._failures += 1
        if self._failures == _FAILURES_TOLD:
            logger.warning(
                "latencies and adapters of this instance are unknown: its API at %s does not "
                "answer (%r); is http_address right?",
                self._http.base_url,
                error,
            )

    def _names(self, answer: Any) -> tuple[str, ...]:
        listed = answer.get("data") if isinstance(answer, dict) else None
        names = [one.get("id") for one in listed or () if isinstance(one, dict)]
        return tuple(sorted({n for n in names if isinstance(n, str)} - {self._model}))

    def _take(self, text: str) -> None:
        now = self._clock.monotonic()
        found: dict[str, _Histogram] = {}
        for name, bound, count in self._buckets.findall(text):
            histogram = found.setdefault(name, {})
            # Summed over all engines of the process.
            histogram[float(bound)] = histogram.get(float(bound), 0.0) + float(count)
        self._seen.append((now, found))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_SECONDS:
            self._seen.popleft()

    def _p90(self, name: str) -> float | None:
        """Computes the quantile as Prometheus' histogram_quantile() does."""
        if len(self._seen) < 2:
            return None
        before, now = self._seen[0][1].get(name, {}), self._seen[-1][1].get(name, {})
        return quantile(0.9, {bound: now[bound] - before.get(bound, 0.0) for bound in now})


def quantile(share: float, histogram: _Histogram) -> float | None:
    """Returns the value that this share of the observations does not exceed, interpolated within
    its bucket; None without observations. Those beyond the last finite bound count as that bound.
    """
    bounds = sorted(histogram)
    total = histogram[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted, low, before = share * total, 0.0, 0.0
    for bound in bounds:
        count = histogram[bound]
        if count >= wanted:
            if math.isinf(bound):
                return low
            inside = (wanted - before) / (count - before) if count > before else 1.0
            return low + (bound - low) * inside
        low, before = bound, count
    return low
