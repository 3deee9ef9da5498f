"""The life of a weight update, as every registry keeps it: pure functions over its record."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvxfer.errors import InvalidArgument, LeaseExpired, WeightUpdateAborted
from kvxfer.instances import Instance
from kvxfer.scheduler import refusals
from kvxfer.weight_updates import (
    MAX_ENDED_UPDATES,
    AnnounceUpdate,
    Decision,
    PartReport,
    ReportUpdate,
    UpdateError,
    UpdatePart,
    UpdateState,
    WeightUpdate,
)

_DECISION: Final = {"committed": Decision.COMMIT, "aborted": Decision.ABORT}
_ENDED: Final = {Decision.COMMIT: UpdateState.COMMITTED, Decision.ABORT: UpdateState.ABORTED}


class UpdateStep(NamedTuple):
    """One step of an update; `before` is None for its first."""

    before: WeightUpdate | None
    after: WeightUpdate


class UpdateLedger:
    """The updates that a registry knows. Belongs to one event loop."""

    def __init__(self, updates: Iterable[WeightUpdate] = ()) -> None:
        self._updates = {update.update_id: update for update in updates}

    def get(self, update_id: str) -> WeightUpdate | None:
        return self._updates.get(update_id)

    def put(self, update: WeightUpdate) -> None:
        self._updates[update.update_id] = update

    def drop(self, update_id: str) -> None:
        self._updates.pop(update_id, None)

    def trim(self) -> None:
        """Forgets the oldest updates that have ended, and keeps MAX_ENDED_UPDATES of them."""
        ended = sorted(
            (update.ended_at, update.update_id)
            for update in self._updates.values()
            if update.ended_at is not None
        )
        for _, update_id in ended[:-MAX_ENDED_UPDATES]:
            self.drop(update_id)

    def all(self, model: str | None = None) -> tuple[WeightUpdate, ...]:
        """Returns the updates of a model, or all, the newest first."""
        found = [u for u in self._updates.values() if model in (None, u.model)]
        return tuple(sorted(found, key=lambda u: (u.started_at, u.update_id), reverse=True))


def announced(
    request: AnnounceUpdate,
    instances: Sequence[Instance],
    known: UpdateLedger,
    *,
    now: float,
    seconds: float,
) -> UpdateStep:
    """Returns the step that begins an update, under a lease of `seconds`; or the update that the
    same request announced before.

    Raises WeightUpdateExists, UnknownInstance, OldVersion, and InvalidArgument if there are no
    instances of the model.
    """
    same = None if request.update_id is None else known.get(request.update_id)
    if same is not None:
        if same.under_way and _is_of(same, request):
            return UpdateStep(same, same)
        raise refusals.update_id_taken(same)
    for other in known.all(request.model):
        if other.under_way:
            raise refusals.update_under_way(other)
    parts = _parts(request, {instance.instance_id: instance for instance in instances})
    newest = max(parts, key=lambda part: part.version)
    if request.version <= newest.version:
        raise refusals.old_version(request.model, request.version, newest)
    update = WeightUpdate(
        update_id=request.update_id or secrets.token_hex(16),
        model=request.model,
        version=request.version,
        policy=request.policy,
        state=UpdateState.STAGING,
        started_at=now,
        lease_seconds=seconds,
        instances=parts,
    )
    return UpdateStep(None, update)


def reported(update: WeightUpdate, report: ReportUpdate, *, now: float) -> WeightUpdate:
    """Returns the update after a report of the coordinator.

    Raises InvalidArgument for an instance that takes no part, and WeightUpdateDecided if the
    decision was not the one that the report says.
    """
    update = replace(
        update,
        instances=_with_news(update, report.instances),
        bytes=update.bytes if report.bytes is None else report.bytes,
        error=report.error or update.error,
    )
    if report.state is None:
        return update
    decision = _DECISION[report.state]
    if update.decision not in (None, decision):
        raise refusals.update_decided(update, report.state)
    return _ended(update, decision, now)


def decided(update: WeightUpdate, decision: Decision, *, now: float) -> WeightUpdate:
    """Returns the update after a decision; the first one holds."""
    if update.decision is not None:
        return update
    if decision is Decision.COMMIT:
        return replace(update, decision=decision, decided_at=now, state=UpdateState.COMMITTING)
    error = update.error or UpdateError(
        code=WeightUpdateAborted.code, message="it was decided to abort it"
    )
    return _ended(replace(update, error=error), decision, now)


def lapsed(update: WeightUpdate, *, at: float) -> WeightUpdate:
    """Returns the update under way after its coordinator has not reported for its lease."""
    silent = f"its coordinator has reported nothing for {update.lease_seconds:g} s"
    if update.decision is Decision.COMMIT:
        silent += " since it was decided to commit; ask the instances which version they serve"
    error = update.error or UpdateError(code=LeaseExpired.code, message=silent)
    return _ended(replace(update, error=error), update.decision or Decision.ABORT, at)


def _ended(update: WeightUpdate, decision: Decision, now: float) -> WeightUpdate:
    return replace(
        update,
        decision=decision,
        state=_ENDED[decision],
        decided_at=now if update.decided_at is None else update.decided_at,
        ended_at=now if update.ended_at is None else update.ended_at,
    )


def _is_of(update: WeightUpdate, request: AnnounceUpdate) -> bool:
    asked = set(request.instances)
    return (update.model, update.version, update.policy) == (
        request.model,
        request.version,
        request.policy,
    ) and (not asked or asked == {part.instance_id for part in update.instances})


def _parts(request: AnnounceUpdate, live: Mapping[str, Instance]) -> tuple[UpdatePart, ...]:
    of_model = (i.instance_id for i in live.values() if i.model == request.model)
    parts = []
    for instance_id in dict.fromkeys(request.instances or of_model):
        instance = live.get(instance_id)
        if instance is None:
            raise refusals.unknown_instance(instance_id)
        if instance.model != request.model:
            raise InvalidArgument(
                f"instance {instance_id!r} is of model {instance.model!r}, and the update of "
                f"{request.model!r}; name the instances of that model"
            )
        parts.append(
            UpdatePart(
                instance_id=instance_id,
                epoch=instance.epoch,
                version=instance.weights_version or 0,
            )
        )
    if not parts:
        raise InvalidArgument(
            f"no instance of model {request.model!r} is registered; start one before its weights "
            "are updated"
        )
    return tuple(parts)


def _with_news(update: WeightUpdate, news: Iterable[PartReport]) -> tuple[UpdatePart, ...]:
    parts = {part.instance_id: part for part in update.instances}
    for each in news:
        part = parts.get(each.instance_id)
        if part is None:
            raise InvalidArgument(
                f"instance {each.instance_id!r} takes no part in update {update.update_id!r}; name "
                "it when the update is announced"
            )
        told = {
            name: value
            for name in ("version", "digest", "pause_seconds", "error")
            if (value := getattr(each, name)) is not None
        }
        if each.state is not None and not part.state.ended:
            order = list(type(part.state))
            told["state"] = max(part.state, each.state, key=order.index)
        parts[each.instance_id] = replace(part, **told)
    return tuple(parts.values())
