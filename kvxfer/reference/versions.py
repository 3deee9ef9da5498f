"""Which requests run with which version of the weights, and how they meet an update."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, NamedTuple

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import (
    DeadlineExceeded,
    KvxferError,
    RequestAborted,
    WrongVersion,
    without_traceback,
)
from kvxfer.reference.compute import ComputeThread

DRAIN_SECONDS: Final = 30.0
_WAIT_SECONDS: Final = 120.0


class Policy(enum.StrEnum):
    """What an update does with running requests. New ones wait until it is applied, in any case."""

    DRAIN = "drain"
    """They end first."""
    ABORT = "abort"
    """They end with RequestAborted, and can be sent again."""
    KEEP = "keep"
    """They go on, from the next token with the new weights."""


class VersionSpan(NamedTuple):
    """Tokens of an answer that one version gave."""

    version: int
    first: int
    """Index of the first of them in the answer."""
    tokens: int
    """How many."""


class Admission:
    """A request that runs. check() may be called by any thread; the rest belongs to one task."""

    def __init__(self, demanded: int | None) -> None:
        self._demanded = demanded
        self._error: KvxferError | None = None
        self.spans: list[VersionSpan] = []
        """Of the tokens so far."""

    def check(self, version: int) -> None:
        """To be called by what computes, before it does, with the version of its weights.

        Raises RequestAborted where an update has ended the request, and WrongVersion where it
        demands another version.
        """
        if self._error is not None:
            raise without_traceback(self._error)
        require_version(self._demanded, version)

    def note(self, version: int) -> None:
        """This version gave one more token."""
        if not self.spans:
            self.spans.append(VersionSpan(version, 0, 1))
        elif self.spans[-1].version == version:
            self.spans[-1] = self.spans[-1]._replace(tokens=self.spans[-1].tokens + 1)
        else:
            first = self.spans[-1].first + self.spans[-1].tokens
            self.spans.append(VersionSpan(version, first, 1))

    def abort(self, error: KvxferError) -> None:
        self._error = error

    @property
    def error(self) -> KvxferError | None:
        """Why it is not to go on."""
        return self._error


class VersionGate:
    """Lets requests in, and an update between two of their steps. Loop only.

    Whatever computes runs in `compute`, one step at a time, and checks its admission first. Under
    `drain` and `abort` an answer is of exactly one version.
    """

    def __init__(
        self,
        compute: ComputeThread,
        policy: Policy = Policy.DRAIN,
        drain_seconds: float = DRAIN_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`policy` is that of updates that bring none. Requests that have not ended after
        `drain_seconds` are aborted."""
        self.version = 0
        """Served now."""
        self._compute, self._clock = compute, clock
        self._policy, self._drain_seconds = policy, drain_seconds
        self._running: set[Admission] = set()
        self._quiet = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()
        self._stopped = 0.0
        """When the last step before the update had ended."""
        self._broken: KvxferError | None = None

    @property
    def broken(self) -> KvxferError | None:
        """Why nothing is served any more."""
        return self._broken

    def require(self, demanded: int | None) -> None:
        """Raises WrongVersion where a request demands another version than is served, and what has
        ended the service."""
        if self._broken is not None:
            raise without_traceback(self._broken)
        require_version(demanded, self.version)

    @contextlib.asynccontextmanager
    async def admit(self, demanded: int | None = None) -> AsyncIterator[Admission]:
        """Waits while an update is applied. Raises as require() does, and DeadlineExceeded where
        the update takes longer than two minutes."""
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the update of the weights has not ended for {_WAIT_SECONDS:g} s; see what its "
                "ranks wait for"
            ) from None
        self.require(demanded)
        admission = Admission(demanded)
        self._running.add(admission)
        try:
            yield admission
        except KvxferError as error:
            # The endpoint cancels transfers when the weights are replaced, and refuses the peer.
            if admission.error is not None:
                raise without_traceback(admission.error) from error
            raise
        finally:
            self._running.discard(admission)
            if not self._running:
                self._quiet.set()

    async def update(
        self,
        swap: Callable[[], int],
        policy: Policy | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> float:
        """Applies an update, or a wave of one; returns the seconds since the update began for which
        no step ran, or under `drain` and `abort`, could have begun.

        `swap` replaces the weights in the compute thread, and returns their version; what it raises
        ends the service. `settle` is awaited before new requests are let in: after the last wave.
        No request can go on between two waves, so `keep` is `drain` then.
        """
        policy = policy or self._policy
        if policy is Policy.KEEP and not (first and last):
            policy = Policy.DRAIN
        async with self._updating:
            self.require(None)
            self._open.clear()
            try:
                await self._meet_running(policy)
                stopped, applied, version = await self._compute.run(lambda: self._timed(swap))
                if first:
                    self._stopped = stopped
                if last:
                    self.version = version
                    if settle is not None:
                        await settle()
            except KvxferError as error:
                self.close(error)
                raise
            except Exception as error:
                self.close(KvxferError(f"the weights could not be replaced: {error!r}"))
                raise
            finally:
                if last or self._broken is not None:
                    self._open.set()
            ended = applied if policy is Policy.KEEP else self._clock.monotonic()
            return ended - self._stopped

    def close(self, error: KvxferError) -> None:
        """Ends the service: running requests and new ones end with this error."""
        self._broken = error
        for each in self._running:
            each.abort(error)

    def _timed(self, swap: Callable[[], int]) -> tuple[float, float, int]:
        stopped = self._clock.monotonic()
        version = swap()
        return stopped, self._clock.monotonic(), version

    async def _meet_running(self, policy: Policy) -> None:
        if policy is Policy.DRAIN and self._running:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_seconds):
                    await self._quiet.wait()
        if policy is not Policy.KEEP:
            # Not waited for: each checks before it computes, which happens after the swap.
            for each in self._running:
                each.abort(
                    RequestAborted(
                        f"aborted by an update of the weights of version {self.version}; send the "
                        "request again"
                    )
                )


def require_version(demanded: int | None, served: int) -> None:
    """Raises WrongVersion, which names both."""
    if demanded not in (None, served):
        raise WrongVersion(
            f"the request demands version {demanded} of the weights and {served} is served; send "
            "it without weights_version, or to an instance that serves that version"
        )
