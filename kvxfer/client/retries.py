"""When a request is sent again: with jitter, not before it is welcome, and inside a deadline."""

from __future__ import annotations

from typing import Any, Final

from tenacity import RetryCallState, retry_if_exception
from tenacity.wait import wait_random_exponential

from kvxfer.client.answers import Failed
from kvxfer.clock import Clock

# Full jitter: a fleet that lost its control plane does not come back in step.
_BACKOFF: Final = wait_random_exponential(multiplier=0.1, max=2.0)


def policy(deadline: float, clock: Clock) -> dict[str, Any]:
    """The arguments of tenacity's `Retrying` and `AsyncRetrying`, but for how they sleep.

    No pause begins that would end after `deadline` seconds from now; then the last failure is
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
