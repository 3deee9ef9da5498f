"""`kvxfer top`: the current activity of the fleet, in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json
from kvxfer.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from kvxfer.overview import Overview


def register(app: typer.Typer) -> None:
    app.command()(top)


@with_options
def top(
    control_plane: ControlPlane,
    model: Annotated[str | None, typer.Option(help="Instances of this model.")] = None,
    role: Annotated[
        Literal["prefill", "decode", "both"] | None, typer.Option(help="Instances of this role.")
    ] = None,
    state: Annotated[
        Literal["joining", "ready", "draining"] | None,
        typer.Option(help="Instances in this state."),
    ] = None,
    zone: Annotated[str | None, typer.Option(help="Instances in this zone.")] = None,
    rack: Annotated[str | None, typer.Option(help="Instances in this rack.")] = None,
    host: Annotated[str | None, typer.Option(help="Instances on this host.")] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it once, as JSON.")] = False,
) -> None:
    """Show the current activity: instances, traffic, transfers, scaling. Ctrl-C ends it.

    It shows the same as the page at the control plane's /, and needs a token with scope monitor or
    admin. Without a terminal it prints once.
    """
    import msgspec

    from kvxfer.cli.top_frame import frame
    from kvxfer.client import calls
    from kvxfer.instances import InstanceState, Role
    from kvxfer.overview import OverviewQuery

    query = OverviewQuery(
        model=model,
        role=None if role is None else Role(role),
        state=None if state is None else InstanceState(state),
        zone=zone,
        rack=rack,
        host=host,
        limit=200,
    )
    with control_plane.connect() as client:

        def look() -> Overview:
            return client.send(calls.overview(query))

        first = look()
        if as_json:
            show_json(msgspec.to_builtins(first))
        elif once or not out.is_terminal:
            out.print(frame(first, height=None))
        else:
            with suppress(KeyboardInterrupt):
                _follow(look, first, interval)


def _follow(
    look: Callable[[], Overview], last: Overview, interval: float, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Draws without end. While the control plane is unavailable, the last state stays, marked as
    stale."""
    from rich.live import Live

    from kvxfer.cli.top_frame import frame
    from kvxfer.errors import ControlPlaneUnavailable, RateLimited

    seen_at, trouble = clock.monotonic(), ""
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            since = clock.monotonic() - seen_at if trouble else 0.0
            shown = frame(last, height=out.height, trouble=trouble, trouble_seconds=since)
            live.update(shown, refresh=True)
            clock.sleep(interval)
            try:
                last, seen_at, trouble = look(), clock.monotonic(), ""
            except (ControlPlaneUnavailable, RateLimited) as error:
                trouble = str(error)
