"""The retries of a request: with jitter, not before Retry-After, and within a deadline."""

from __future__ import annotations

from typing import Any, Final

from tenacity import RetryCallState, retry_if_exception
from tenacity.wait import wait_random_exponential

from kvxfer.client.answers import Failed
from kvxfer.clock import Clock

# Full jitter: a fleet that lost its control plane does not come back in step.
_BACKOFF: Final = wait_random_exponential(multiplier=0.1, max=2.0)


def policy(deadline: float, clock: Clock) -> dict[str, Any]:
    """Returns the arguments of tenacity's `Retrying` and `AsyncRetrying`, except how they sleep.

    No pause begins that would end later than `deadline` seconds from now; the last failure is then
    raised.
    """
    began = clock.monotonic()

    def too_late(state: RetryCallState) -> bool:
        return clock.monotonic() - began + state.upcoming_sleep >= deadline

    return {
        "retry": retry_if_exception(lambda error: isinstance(error, Failed) and error.again),
        "stop": too_late,
        "wait": _pause,
        "reraise": True,
    }


def _pause(state: RetryCallState) -> float:
    failed = state.outcome.exception() if state.outcome is not None else None
    asked = failed.seconds if isinstance(failed, Failed) else 0.0
    return asked + _BACKOFF(state)
