"""`kvxfer instances`: the workers that the control plane knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json, show_staleness
from kvxfer.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.client import SyncControlPlaneClient
    from kvxfer.client.answers import Answer
    from kvxfer.client.calls import Call
    from kvxfer.instances import Instance

_POLL_SECONDS: Final = 0.5


def register(app: typer.Typer) -> None:
    app.command()(instances)


@with_options
def instances(
    control_plane: ControlPlane,
    role: Annotated[
        Literal["prefill", "decode", "both"] | None,
        typer.Option(help="Instances of this role."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Instances of this model.")] = None,
    state: Annotated[
        Literal["joining", "ready", "draining"] | None,
        typer.Option(help="Instances in this state."),
    ] = None,
    until_count: Annotated[
        int | None, typer.Option(min=0, help="Wait until there are exactly this many.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds that --until-count may wait.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List the workers that the control plane knows.

    With --until-count it waits first; the exit code is 1 if the deadline passes before.
    """
    import msgspec

    from kvxfer.client import calls
    from kvxfer.instances import InstanceState, Role

    asked = calls.instances(
        role=None if role is None else Role(role),
        model=model,
        state=None if state is None else InstanceState(state),
    )
    with control_plane.connect() as client:
        if until_count is None:
            answer = client.ask(asked)
        else:
            answer = _until(client, asked, until_count, deadline)
    found = answer.value
    if as_json:
        stale = {"stale_seconds": answer.stale_seconds}
        show_json({"instances": msgspec.to_builtins(found), **stale})
        return
    if found:
        out.print(_table(found, SYSTEM_CLOCK.unix()))
    else:
        out.print("no instance matches" if role or model or state else "no instance is registered")
    show_staleness(answer.stale_seconds)


def _until(
    client: SyncControlPlaneClient,
    asked: Call[tuple[Instance, ...]],
    count: int,
    deadline: float,
    clock: Clock = SYSTEM_CLOCK,
) -> Answer[tuple[Instance, ...]]:
    """Returns the first answer with `count` instances that is not stale. Raises
    DeadlineExceeded."""
    from kvxfer.errors import ControlPlaneUnavailable, DeadlineExceeded

    end = clock.monotonic() + deadline
    while True:
        try:
            answer = client.ask(asked)
            if len(answer.value) == count and answer.stale_seconds is None:
                return answer
            seen = f"the last count was {len(answer.value)}"
            if answer.stale_seconds is not None:
                seen += ", and stale: the control plane cannot reach its registry"
        except ControlPlaneUnavailable as error:
            seen = str(error)
        if clock.monotonic() + _POLL_SECONDS > end:
            raise DeadlineExceeded(f"not {count} such instances within {deadline:g} s: {seen}")
        clock.sleep(_POLL_SECONDS)


def _table(instances: Sequence[Instance], now: float) -> Table:
    from rich.table import Table

    # Engines have long ids: the columns of ids and models shrink if there is no room.
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("instance", "role", "state", "model"):
        table.add_column(name, overflow="fold", no_wrap=name in ("role", "state"))
    draining = any(instance.drain_deadline is not None for instance in instances)
    versions = any(instance.weights_version for instance in instances)  # 0: never updated
    numbers = (
        *("run+wait", "transfers", "free blocks", "seen"),
        *["drain"] * draining,
        *["weights"] * versions,
    )
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for instance in instances:
        free, cached = instance.load.free_blocks, instance.load.cached_blocks
        with_cached = "" if cached is None else f", {cached} cached"
        table.add_row(
            instance.instance_id,
            instance.role,
            instance.state,
            instance.model,
            f"{instance.load.running} + {instance.load.waiting}",
            str(instance.reserved.transfers),
            f"{'?' if free is None else free} of {instance.num_blocks}{with_cached}",
            f"{max(0.0, now - instance.heartbeat_at):.1f} s ago",
            *[_drain(instance, now)] * draining,
            *[_weights(instance)] * versions,
        )
    return table


def _drain(instance: Instance, now: float) -> str:
    if instance.drain_deadline is None:
        return ""
    return f"{max(0.0, instance.drain_deadline - now):.0f} s left"


def _weights(instance: Instance) -> str:
    version = instance.weights_version
    return "?" if version is None else str(version)
