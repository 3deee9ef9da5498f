"""`kvxfer drain`: lets an instance finish its work, and waits until it has left. `kvxfer undrain`
cancels a drain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import err, out, show_json
from kvxfer.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from kvxfer.client import SyncControlPlaneClient
    from kvxfer.instances import Instance

_POLL_SECONDS: Final = 0.5
# A worker learns of its deadline at a heartbeat, and then needs time to stop.
_GRACE_SECONDS: Final = 15.0


class Until(StrEnum):
    LEFT = "left"
    IDLE = "idle"


def register(app: typer.Typer) -> None:
    app.command()(drain)
    app.command()(undrain)


@with_options
def drain(
    instance_id: Annotated[
        str, typer.Argument(metavar="ID", envvar="KVXFER_INSTANCE_ID", show_default=False)
    ],
    control_plane: ControlPlane,
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds until it leaves even if it is not finished.")
    ] = 60.0,
    wait: Annotated[bool, typer.Option(help="Wait until it has left.")] = True,
    until: Annotated[
        Until,
        typer.Option(
            help="With idle, wait only until it has no transfer and no request, and may be stopped."
        ),
    ] = Until.LEFT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the instance as last seen, as JSON.")
    ] = False,
) -> None:
    """Drain an instance: it gets no new work, finishes what it has, and leaves.

    If the instance is draining already, this sets a new deadline. The exit code is 1 if the
    instance is still registered 15 s after its deadline, or with --until idle, if it is still busy.
    """
    import msgspec

    left = wait
    with control_plane.connect() as client:
        since = _latest_change(client) if wait else 0
        told = last = _drain(client, instance_id, deadline)
        if wait:
            with err.status("") as status:
                for last in _until_gone(client, told, since, deadline):
                    status.update(_progress(last))
                    if until is Until.IDLE and _idle(last, told):
                        left = False
                        break
    if as_json:
        show_json({"left": left, "instance": msgspec.to_builtins(last)})
    elif left:
        out.print(f"{instance_id} has left", highlight=False)
    elif wait:
        out.print(f"{instance_id} is idle", highlight=False)
    else:
        out.print(_progress(last), highlight=False)


@with_options
def undrain(
    instance_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    control_plane: ControlPlane,
    as_json: Annotated[bool, typer.Option("--json", help="Print the instance.")] = False,
) -> None:
    """Cancel a drain: the instance gets requests again.

    It waits for the worker's next heartbeat, which confirms that. A worker that has begun to leave
    goes on leaving; the exit code is then 1. A `kvxfer drain` that still waits drains the instance
    again: stop that first.
    """
    import msgspec

    with control_plane.connect() as client:
        undrained = _until_told(client, client.undrain(instance_id))
    if as_json:
        show_json(msgspec.to_builtins(undrained))
    else:
        out.print(f"{instance_id} is {undrained.state}", highlight=False)


def _until_told(
    client: SyncControlPlaneClient, instance: Instance, clock: Clock = SYSTEM_CLOCK
) -> Instance:
    """Returns the instance after its worker's next heartbeat. Raises InstanceLeaving if the worker
    leaves."""
    from kvxfer.errors import InstanceLeaving
    from kvxfer.instances import InstanceState

    told, end = instance.heartbeat_at, clock.monotonic() + _GRACE_SECONDS
    while instance.state is InstanceState.JOINING and instance.heartbeat_at == told:
        if clock.monotonic() > end:
            break
        clock.sleep(_POLL_SECONDS)
        instance = client.instance(instance.instance_id)
    if instance.state is InstanceState.DRAINING:
        raise InstanceLeaving(
            f"the worker of instance {instance.instance_id!r} had begun to leave; start it again "
            "when it has left"
        )
    return instance


def _drain(client: SyncControlPlaneClient, instance_id: str, seconds: float) -> Instance:
    """Drains with the secret that a worker on this host keeps; each lease has another one."""
    from kvxfer.instance_secret import kept_secret

    secret = kept_secret(instance_id)
    return client.drain(instance_id, deadline_seconds=seconds, secret=secret)


def _latest_change(client: SyncControlPlaneClient) -> int:
    with closing(client.watch()) as changes:
        return next(changes).id


def _until_gone(
    client: SyncControlPlaneClient,
    instance: Instance,
    since: int,
    deadline: float,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[Instance]:
    """Yields the instance again and again until the changes after `since` show that it has left.

    A control plane that lost its memory has no such change. The worker then registers again, and is
    told to drain again. Raises DeadlineExceeded.
    """
    from kvxfer.errors import DeadlineExceeded

    end = clock.monotonic() + deadline
    while clock.monotonic() <= end + _GRACE_SECONDS:
        yield instance
        clock.sleep(_POLL_SECONDS)
        seen = _find(client, instance.instance_id)
        if seen is None or seen.epoch != instance.epoch:
            forgotten_at = _forgotten_at(client, instance, since)
            if forgotten_at is None:
                return
            since = forgotten_at
            seen = seen or _returned(client, instance.instance_id, clock)
        if seen.drain_deadline is None:
            seen = _drain(client, seen.instance_id, max(0.0, end - clock.monotonic()))
        instance = seen
    raise DeadlineExceeded(
        f"instance {instance.instance_id!r} has not left {_GRACE_SECONDS:g} s after its deadline "
        f"of {deadline:g} s; stop its worker"
    )


def _find(client: SyncControlPlaneClient, instance_id: str) -> Instance | None:
    from kvxfer.errors import UnknownInstance

    try:
        return client.instance(instance_id)
    except UnknownInstance:
        return None


def _returned(client: SyncControlPlaneClient, instance_id: str, clock: Clock) -> Instance:
    """Returns the instance once it has registered again. Raises DeadlineExceeded."""
    from kvxfer.errors import DeadlineExceeded

    give_up = clock.monotonic() + _GRACE_SECONDS
    while clock.monotonic() <= give_up:
        clock.sleep(_POLL_SECONDS)
        if seen := _find(client, instance_id):
            return seen
    raise DeadlineExceeded(
        f"the control plane lost its memory while instance {instance_id!r} drained, and it has not "
        f"registered again within {_GRACE_SECONDS:g} s; check whether its worker still runs"
    )


def _forgotten_at(client: SyncControlPlaneClient, instance: Instance, since: int) -> int | None:
    """Returns None if the changes after `since` show that this registration has ended; if they are
    lost, the change to go on from."""
    from kvxfer.instances import InstanceState, Snapshot

    with closing(client.watch(since)) as changes:
        for item in changes:
            if isinstance(item, Snapshot):
                return item.id
            told = item.instance
            ended = told.state is InstanceState.GONE
            if ended and (told.instance_id, told.epoch) == (instance.instance_id, instance.epoch):
                return None
    raise AssertionError("a watch has no end")


def _idle(instance: Instance, told: Instance) -> bool:
    """Whether the instance has no work left, by a heartbeat after it was `told` to drain: an
    earlier one may not count a request that has just begun."""
    busy = instance.load.running or instance.load.waiting or instance.reserved.transfers
    return not busy and (instance.epoch, instance.heartbeat_at) > (told.epoch, told.heartbeat_at)


def _progress(instance: Instance) -> str:
    left = max(0.0, (instance.drain_deadline or 0.0) - SYSTEM_CLOCK.unix())
    return (
        f"{instance.instance_id} drains: {instance.load.running} running, "
        f"{instance.load.waiting} waiting, {instance.reserved.transfers} transfers open, "
        f"{left:.0f} s left"
    )
