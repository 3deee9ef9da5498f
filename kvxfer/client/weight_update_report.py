"""The coordinator's report of a weight update to the control plane, without waiting for it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

from msgspec.structs import replace

from kvxfer.client import calls
from kvxfer.client.calls import Call
from kvxfer.client.clients import ControlPlaneClient
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    KvxferError,
    OldVersion,
    UnknownInstance,
    UnknownWeightUpdate,
    WeightUpdateAborted,
    WeightUpdateExists,
)
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decision,
    PartReport,
    ReportUpdate,
    UpdateError,
    UpdatePolicy,
    WeightUpdate,
)

_log = logging.getLogger("kvxfer.weights")

_PAUSE_SECONDS: Final = 0.5
# Renewals in the time that a lease lasts.
_RENEWALS: Final = 3
_REFUSALS: Final = (InvalidArgument, OldVersion, UnknownInstance, WeightUpdateExists)

T = TypeVar("T")


class WeightUpdateReport:
    """The report of one update, which is announced on entry and reported until exit. One event
    loop.

    Entry, `decide` and `end` take at most `patience` seconds each. A task sends the last news of
    each instance, so an update never waits for them; the task also renews the lease, and announces
    the update later if the control plane was unavailable on entry.

    `required`: without the control plane there is no update. Entry and `decide` then raise
    ControlPlaneUnavailable. Otherwise the update goes on, and the coordinator decides.

    `instances` take part; if empty, all live instances of the model do. Entry raises
    WeightUpdateExists, OldVersion, UnknownInstance or InvalidArgument if the update is refused.
    """

    def __init__(
        self,
        client: ControlPlaneClient,
        *,
        model: str,
        version: int,
        update_id: str | None = None,
        policy: UpdatePolicy = UpdatePolicy.DRAIN,
        instances: Sequence[str] = (),
        required: bool = False,
        patience: float = 2.0,
    ) -> None:
        self._client = client
        self._request = AnnounceUpdate(
            update_id=update_id or uuid.uuid4().hex,
            model=model,
            version=version,
            policy=policy,
            instances=tuple(instances),
        )
        self._required = required
        self._patience = patience
        self._known: WeightUpdate | None = None
        self._decision: Decision | None = None
        self._refused: KvxferError | None = None
        self._trouble: str | None = None
        self._news: dict[str, PartReport] = {}
        self._bytes: int | None = None
        self._told = asyncio.Event()
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def update_id(self) -> str:
        return str(self._request.update_id)

    @property
    def decision(self) -> Decision | None:
        """The decision that the control plane last reported: an operator or an instance may have
        decided to abort. None if there is none yet."""
        return self._decision

    async def __aenter__(self) -> Self:
        try:
            await self._announce()
        except KvxferError as error:
            if self._required or isinstance(error, _REFUSALS):
                raise
            self._note(error)
        self._task = asyncio.create_task(self._keep(), name=f"report of {self.update_id}")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._decision is Decision.COMMIT:
            await self._stop()  # the decision lasts; the lease ends an update without reports
        elif not self._ended:
            told = str(exc) if isinstance(exc, KvxferError) else "its coordinator left it"
            code = exc.code if isinstance(exc, KvxferError) else WeightUpdateAborted.code
            await self.end("aborted", UpdateError(code=code, message=told[:2048]))

    def progress(self, *news: PartReport, sent_bytes: int | None = None) -> None:
        """Reports news of instances, and the bytes sent to all of them. Returns at once."""
        for each in news:
            before = self._news.get(each.instance_id)
            self._news[each.instance_id] = each if before is None else _merged(before, each)
        self._bytes = self._bytes if sent_bytes is None else sent_bytes
        self._told.set()

    async def decide(self, decision: Decision) -> Decision:
        """Returns the decision that holds: this one, or another one that came first.

        Without an answer it is this one, unless the control plane is `required`: then this raises.
        The control plane may have recorded `decision` nevertheless, and answer an instance with it.
        Ask again; until there is an answer, tell no instance otherwise.
        """
        try:
            if self._known is None:
                await self._announce()
            call = calls.decide_weight_update(self.update_id, decision)
            self._decision = (await self._send(call)).decision
        except KvxferError as error:
            if self._required:
                raise
            self._note(error)
            self._decision = self._decision or decision
        return self._decision

    async def end(
        self, state: Literal["committed", "aborted"], error: UpdateError | None = None
    ) -> None:
        """Sends the last report. Does not raise if it is lost: the lease ends the update."""
        self._ended = True
        await self._stop()
        if self._known is None:
            return
        try:
            await self._report(state, error)
        except KvxferError as refused:
            self._note(refused)

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _keep(self) -> None:
        while True:
            lease = _PAUSE_SECONDS if self._known is None else self._known.lease_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(lease / _RENEWALS):
                    await self._told.wait()
            try:
                if self._known is None:
                    await self._announce()
                await self._report()
            except UnknownWeightUpdate as error:
                # The control plane lost its memory, and with it any decision.
                self._note(error)
                if self._decision is not None:
                    return
                self._known = None
            except _REFUSALS as error:
                self._note(error)
                return
            except KvxferError as error:
                self._note(error)
            else:
                self._note(None)
                continue
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _announce(self) -> None:
        if self._refused is not None:
            raise self._refused
        try:
            self._known = await self._send(calls.announce_weight_update(self._request))
        except _REFUSALS as error:
            self._refused = error
            raise

    async def _report(
        self,
        state: Literal["committed", "aborted"] | None = None,
        error: UpdateError | None = None,
    ) -> None:
        news, self._news = self._news, {}
        self._told.clear()
        report = ReportUpdate(
            state=state, error=error, bytes=self._bytes, instances=tuple(news.values())
        )
        try:
            update = await self._send(calls.report_weight_update(self.update_id, report))
        except BaseException:
            for each in news.values():
                after = self._news.get(each.instance_id)
                self._news[each.instance_id] = each if after is None else _merged(each, after)
            raise
        # An answer from before the decision may arrive after the decision's.
        self._known, self._decision = update, update.decision or self._decision

    async def _send(self, call: Call[T]) -> T:
        try:
            async with asyncio.timeout(self._patience):
                return await self._client.send(call.within(self._patience))
        except TimeoutError as error:
            raise ControlPlaneUnavailable(
                f"no answer from {self._client.url} in {self._patience:g} s; check that the "
                "control plane runs"
            ) from error

    def _note(self, error: KvxferError | None) -> None:
        trouble = None if error is None else str(error)
        if trouble != self._trouble:
            self._trouble = trouble
            level = logging.INFO if error is None else logging.WARNING
            _log.log(level, "weight update %s: %s", self.update_id, trouble or "is reported again")


def _merged(before: PartReport, after: PartReport) -> PartReport:
    told = {
        name: value
        for name in PartReport.__struct_fields__
        if (value := getattr(after, name)) is not None
    }
    return replace(before, **told)
