"""Steps of vLLM that compute nothing: while transfers are pending, it makes 1000 per second."""

from __future__ import annotations

from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock

# Limits of a wait, which delays new requests: seconds, and a share of the idle time before it.
MOST_SECONDS: Final = 0.010
_SHARE: Final = 0.5


class IdleSteps:
    """The time that the workers may wait in a step. One thread: the engine's own loop."""

    def __init__(self, *, allowed: bool, clock: Clock = SYSTEM_CLOCK) -> None:
        """`allowed` is False if other engines wait for this one's steps (data parallel MoE)."""
        self._allowed = allowed
        self._clock = clock
        self._idle_since: float | None = None

    def step(self, tokens: int) -> float:
        """Returns the seconds to wait in a step that computes `tokens` tokens: 0 if any."""
        if tokens or not self._allowed:
            self._idle_since = None
            return 0.0
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        return min((now - self._idle_since) * _SHARE, MOST_SECONDS)
