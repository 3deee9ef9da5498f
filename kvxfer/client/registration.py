"""A worker's registration: made on entry, kept by heartbeats, ended on exit."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec.structs import replace

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client import calls
from kvxfer.client.clients import ControlPlaneClient
from kvxfer.clock import CLOCK_LEEWAY, SYSTEM_CLOCK, Clock, as_text
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InstanceExists,
    KvxferError,
    RateLimited,
    StaleEpoch,
)
from kvxfer.instance_secret import keep_secret
from kvxfer.instances import InstanceSpec, InstanceState, Lease, Load, Role
from kvxfer.model_identity import ModelIdentity

_log = logging.getLogger("kvxfer.registration")

_RETRY_SECONDS: Final = 0.25
_GOODBYE_SECONDS: Final = 2.0
# The time for the client's own attempts at one step, at most one heartbeat interval. Then the error
# is logged and the next step begins.
_STEP_SECONDS: Final = 2.0
# The largest part of an interval by which a heartbeat comes early, so that a fleet's do not
# coincide.
_JITTER: Final = 0.1


class Registration:
    """The registration of an instance: it begins on entry, a task renews its lease, and it ends on
    exit. One event loop.

    `spec` names the instance as its KvEndpoint does, and says where its Engine listens.
    `load` is called before each heartbeat. `on_epoch` is called with the epoch of each
    registration: the first one, and each later one after a lease was lost, because this process was
    frozen for longer than its lease or because the control plane forgot it. Pass the `set_epoch` of
    the KvEndpoint, whose tickets name that epoch. `on_role` is called with the role that an
    operator gives this instance; the role stays when a lease is lost. Updates of `cached` are
    published after each heartbeat. The secret of the lease is also in a file, where `kvxfer drain`
    of the same user finds it (kvxfer.instance_secret).

    While the control plane is unavailable the worker keeps working; it is registered again within
    one heartbeat interval of the control plane's return.

    Entry raises ControlPlaneUnavailable after `patience` seconds without an answer, and
    InstanceExists if another live process holds the id. If the holder has just crashed, entry waits
    for its lease to end.
    """

    def __init__(
        self,
        client: ControlPlaneClient,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.READY,
        load: Callable[[], Load] | None = None,
        on_epoch: Callable[[int], None] | None = None,
        on_role: Callable[[Role], None] | None = None,
        cached: CachedBlocks | None = None,
        patience: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._client = client
        self._spec = spec
        self._state = state
        self._load = load
        self._on_epoch = on_epoch
        self._on_role = on_role
        self._cached = cached
        self._secret: str | None = None
        self._secret_file: Path | None = None
        self._patience = patience
        self._incarnation = uuid.uuid4().hex
        self._lease: Lease | None = None
        self._epoch = 0
        self._interval = _RETRY_SECONDS
        self._step = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        self._clocks_differ = False
        self._drain_deadline: float | None = None
        self._drained = asyncio.Event()
        # Set by drained(); otherwise the worker stays until it is stopped.
        self._leaves_drained = False

    @property
    def instance_id(self) -> str:
        return self._spec.instance_id

    @property
    def epoch(self) -> int:
        """The epoch of the latest registration; 0 before the first."""
        return self._epoch

    @property
    def registered(self) -> bool:
        """Whether this instance has a lease, by the control plane's latest answer."""
        return self._lease is not None

    @property
    def secret(self) -> str | None:
        """The secret that calls as this instance send; None if the control plane gave none."""
        return self._secret

    @property
    def state(self) -> InstanceState:
        """The state as last set here, or a later one that the control plane set."""
        return self._state if self._lease is None else self._state.advanced_to(self._lease.state)

    @property
    def role(self) -> Role:
        """The role as registered, or a later one that the control plane set."""
        return self._spec.role

    async def drained(self) -> None:
        """Waits until this instance is drained: it should leave then.

        It is drained when no transfer and no request is left, as far as `load` counts them, or when
        the deadline of the drain has passed. From then on the drain cannot be undone.
        """
        self._leaves_drained = True
        await self._drained.wait()

    async def __aenter__(self) -> Self:
        await self._join()
        if self._load is not None:
            self.load_changed()
        self._task = asyncio.create_task(self._keep(), name=f"heartbeats of {self.instance_id}")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._secret_file is not None:
            with suppress(OSError):
                self._secret_file.unlink(missing_ok=True)
        if self._lease is not None:
            # Best effort: without it the lease ends by itself.
            with suppress(KvxferError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await self._client.deregister(
                        self.instance_id, self._epoch, secret=self._secret
                    )
            self._lease = None

    async def advance(self, state: InstanceState) -> None:
        """Moves on to `state` (joining → ready → draining) and reports it now."""
        self._state = self._state.advanced_to(state)
        await self.heartbeat()

    async def withdraw(self) -> bool:
        """Registers a ready instance again, as joining, so that it gets no work until advance();
        tickets so far end with their epoch. Returns whether it was ready. Does not raise if that
        fails: the next heartbeat tries again."""
        async with self._step:
            was_ready = self.state is InstanceState.READY
            if was_ready:
                self._state = InstanceState.JOINING
                self._lease = None
        await self.heartbeat()
        return was_ready

    async def take_model(self, model: ModelIdentity) -> None:
        """Registers again, with the model that the KV cache is of now; tickets for the earlier one
        end with their epoch. Does not raise if that fails: the next heartbeat tries again."""
        async with self._step:
            self._spec = replace(self._spec, identity=model)
            self._lease = None
        await self.heartbeat()

    def load_changed(self) -> None:
        """Sends the next heartbeat at once, at least a quarter of a second after the last one. A
        worker that refuses requests for lack of blocks gets none until the control plane knows that
        blocks are free."""
        self._changed.set()

    async def heartbeat(self) -> None:
        """Renews the lease now, or registers again if it was lost.

        Does not raise if that fails: the next heartbeat tries again.
        """
        async with self._step:
            try:
                async with asyncio.timeout(max(self._interval, _RETRY_SECONDS)):
                    await self._renew()
                    await self._publish_cached()
            except TimeoutError:
                self._note_trouble(f"no answer from {self._client.url} in {self._interval} s")
            except KvxferError as error:
                self._note_trouble(str(error))
            else:
                self._note_trouble(None)

    async def _join(self) -> None:
        clock = self._clock.monotonic
        give_up = clock() + self._patience
        waited, heard = False, None
        while True:
            try:
                async with self._step:
                    left = max(give_up - clock(), _RETRY_SECONDS)
                    await self._register(min(left, _STEP_SECONDS))
                return
            except (ControlPlaneUnavailable, RateLimited) as error:
                if clock() + _RETRY_SECONDS > give_up:
                    raise
                self._note_trouble(str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except InstanceExists as error:
                remaining = error.details.get("lease_remaining_seconds")
                before, heard = heard, await self._heard_of_holder()
                silent = heard is not None and heard == before
                if (waited and not silent) or not isinstance(remaining, int | float):
                    raise
                waited = True
                _log.warning(
                    "instance %s is still held; waiting %.1f s for that lease to end",
                    self.instance_id,
                    remaining,
                )
                await asyncio.sleep(remaining + _RETRY_SECONDS)

    async def _heard_of_holder(self) -> tuple[int, float] | None:
        """Returns the epoch that holds this id, and its last heartbeat; None if unknown.

        A lease that lasts is no sign of life: all leases last while the control plane is stopped.
        """
        with suppress(KvxferError):
            held = await self._client.instance(self.instance_id)
            return held.epoch, held.heartbeat_at
        return None

    async def _keep(self) -> None:
        clock = self._clock.monotonic
        began = clock()
        while True:
            # Counted from the beginning of the last one: one that hung must not delay the next.
            due = began + self._interval * (1 - random.uniform(0, _JITTER))  # noqa: S311
            with suppress(TimeoutError):
                async with asyncio.timeout(due - clock()):
                    await self._changed.wait()
                    await asyncio.sleep(began + _RETRY_SECONDS - clock())
            self._changed.clear()
            began = clock()
            try:
                await self.heartbeat()
                await self._look_at_drain()
            except Exception:
                # An error in a callback of the worker must not cost it its lease.
                _log.exception("a heartbeat of instance %s failed", self.instance_id)

    async def _renew(self) -> None:
        if self._lease is not None:
            try:
                call = calls.heartbeat(
                    self.instance_id,
                    self._epoch,
                    state=self._state,
                    load=self._current_load(),
                    secret=self._secret,
                )
                asked_at = self._clock.unix()
                self._hold(await self._client.send(call.within(self._step_seconds)))
                self._compare_clocks(asked_at)
                return
            except StaleEpoch as error:
                _log.warning("%s", error)
                self._lease = None
        await self._register(self._step_seconds)

    async def _publish_cached(self) -> None:
        cached = self._cached
        update = None if cached is None else cached.take(self._epoch)
        if cached is None or update is None:
            return
        call = calls.publish_blocks(self.instance_id, self._epoch, update, secret=self._secret)
        try:
            published = await self._client.send(call.within(self._step_seconds))
        except BaseException:
            cached.lost()
            raise
        cached.kept(published.capacity)

    async def _register(self, seconds: float) -> None:
        if self._drain_deadline is not None:
            # The control plane forgets the drain with the registration.
            self._state = InstanceState.DRAINING
        # A lease begins as joining or ready; a heartbeat reports a later state.
        begin = min(self._state, InstanceState.READY, key=list(InstanceState).index)
        call = calls.register(
            self._spec, state=begin, incarnation=self._incarnation, takes_secret=True
        )
        asked_at = self._clock.unix()
        lease = await self._client.send(call.within(seconds))
        self._epoch, self._secret = lease.epoch, lease.secret
        self._keep_secret()
        self._hold(lease)
        self._compare_clocks(asked_at)
        if self._on_epoch is not None:
            self._on_epoch(lease.epoch)
        if begin is not self._state:
            self._hold(
                await self._client.heartbeat(
                    self.instance_id, self._epoch, state=self._state, secret=self._secret
                )
            )

    def _keep_secret(self) -> None:
        if self._secret is None:
            return
        try:
            self._secret_file = keep_secret(self.instance_id, self._secret)
        except OSError as error:
            _log.warning(
                "instance %s: its secret cannot be kept in a file (%s), so `kvxfer drain` needs a "
                "token of scope admin; name a folder for it in KVXFER_RUNTIME_DIR",
                *(self.instance_id, error),
            )

    def _hold(self, lease: Lease) -> None:
        self._lease = lease
        self._interval = lease.heartbeat_interval
        if lease.drain_seconds is not None:
            self._drain_deadline = self._clock.monotonic() + lease.drain_seconds
        elif self._drain_deadline is not None and self._state is not InstanceState.DRAINING:
            self._drain_deadline = None
            _log.info("the drain of instance %s was undone", self.instance_id)
        if lease.role.known and lease.role is not self._spec.role:
            self._spec = replace(self._spec, role=lease.role)
            if self._on_role is not None:
                self._on_role(lease.role)

    def _compare_clocks(self, asked_at: float) -> None:
        """Warns once if this host's clock and the control plane's differ by more than tickets
        allow, at whatever moment of the call the control plane read its clock."""
        there = None if self._lease is None else self._lease.at
        if there is None:  # an older control plane
            return
        here = self._clock.unix()
        ahead, behind = asked_at - there, there - here
        seconds, how = (ahead, "ahead of") if ahead > behind else (behind, "behind")
        differ = seconds > CLOCK_LEEWAY
        if differ and not self._clocks_differ:
            _log.warning(
                "instance %s: the clock of this host is %.1f s %s the control plane's (%s here, %s "
                "there), and tickets may be refused; synchronise the clocks of the hosts (NTP)",
                *(self.instance_id, seconds, how, as_text(here), as_text(there)),
            )
        self._clocks_differ = differ

    async def _look_at_drain(self) -> None:
        if self._drain_deadline is None or not self._leaves_drained:
            return
        load = self._current_load() or Load()
        expected = 0 if self._lease is None else self._lease.reserved.transfers
        idle = not (load.running or load.waiting or expected)
        if idle or self._clock.monotonic() >= self._drain_deadline:
            if self._state is not InstanceState.DRAINING:
                await self.advance(InstanceState.DRAINING)  # it cannot be undone any more
            self._drained.set()

    @property
    def _step_seconds(self) -> float:
        # A pause beyond the end of the step would be cut off, and would delay the next attempt.
        return min(self._interval, _STEP_SECONDS)

    def _current_load(self) -> Load | None:
        if self._load is None:
            return None
        try:
            return self._load()
        except Exception:
            # A worker that cannot count its load is alive nevertheless.
            _log.exception("the load of instance %s could not be read", self.instance_id)
            return None

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        if trouble is None:
            _log.info("instance %s is registered again", self.instance_id)
        else:
            _log.warning("instance %s: %s", self.instance_id, trouble)
        self._trouble = trouble
