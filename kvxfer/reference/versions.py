"""The version of the weights that each request runs with, and the effect of an update on it."""

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
    """The effect of an update on running requests. New ones always wait until it is applied."""

    DRAIN = "drain"
    """Requests end first."""
    ABORT = "abort"
    """Requests end with RequestAborted, and can be sent again."""
    KEEP = "keep"
    """Requests continue, with the new weights from the next token on."""


class VersionSpan(NamedTuple):
    """Consecutive tokens of an answer that one version computed."""

    version: int
    first: int
    """Index of the first of them in the answer."""
    tokens: int
    """The number of tokens."""


class Admission:
    """A running request. Any thread may call check(); the rest belongs to one task."""

    def __init__(self, demanded: int | None) -> None:
        self._demanded = demanded
        self._error: KvxferError | None = None
        self.spans: list[VersionSpan] = []
        """The versions of the tokens so far."""

    def check(self, version: int) -> None:
        """Checks the version of the weights before each computation.

        Raises the error that has ended the request, such as RequestAborted after an update, and
        WrongVersion if the request demands another version.
        """
        if self._error is not None:
            raise without_traceback(self._error)
        require_version(self._demanded, version)

    def note(self, version: int) -> None:
        """Counts one more token of this version."""
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
        """The error that has ended the request, or None."""
        return self._error


class VersionGate:
    """A gate that admits requests, and updates between two of their steps. Loop only.

    Each step runs in `compute` and first checks its admission. Under `drain` and `abort` an answer
    is of exactly one version.
    """

    def __init__(
        self,
        compute: ComputeThread,
        policy: Policy = Policy.DRAIN,
        drain_seconds: float = DRAIN_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`policy` is that of updates without one. Requests that have not ended after
        `drain_seconds` are aborted."""
        self.version = 0
        """The version that is served now."""
        self._compute, self._clock = compute, clock
        self._policy, self._drain_seconds = policy, drain_seconds
        self._running: set[Admission] = set()
        self._quiet = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._updating = asyncio.Lock()
        self._stopped = 0.0
        """The time at which the last step before the update had ended."""
        self._broken: KvxferError | None = None

    @property
    def broken(self) -> KvxferError | None:
        """The error that has ended the service, or None."""
        return self._broken

    def require(self, demanded: int | None) -> None:
        """Raises the error that has ended the service, and WrongVersion if a request demands
        another version than is served."""
        if self._broken is not None:
            raise without_traceback(self._broken)
        require_version(demanded, self.version)

    @contextlib.asynccontextmanager
    async def admit(self, demanded: int | None = None) -> AsyncIterator[Admission]:
        """Admits a request, once no update is being applied. Raises as require() does, and
        DeadlineExceeded if the update takes longer than two minutes."""
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
        """Applies an update, or a wave of one. Returns the seconds since the last step before the
        first wave: under `keep` until the weights were replaced, else until new steps could begin.

        `swap` replaces the weights in the compute thread, and returns their version; an error in it
        ends the service. After the last wave, `settle` is awaited before new requests are admitted.
        No request can continue between two waves, so `keep` acts as `drain` then.
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
            # No need to wait: each checks before its next step, which runs after the swap.
            for each in self._running:
                each.abort(
                    RequestAborted(
                        f"aborted by an update of the weights of version {self.version}; send the "
                        "request again"
                    )
                )


def require_version(demanded: int | None, served: int) -> None:
    """Raises WrongVersion, which names both versions, if a version is demanded but not served."""
    if demanded not in (None, served):
        raise WrongVersion(
            f"the request demands version {demanded} of the weights and {served} is served; send "
            "it without weights_version, or to an instance that serves that version"
        )
