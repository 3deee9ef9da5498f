"""`kvxfer trace`: the timeline of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import err, out, show_json
from kvxfer.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from kvxfer.client import SyncControlPlaneClient
    from kvxfer.traces import Trace

_PAUSE_SECONDS: Final = 0.25
# Exporters send once a second: after this long without new spans, a trace counts as complete.
_QUIET_SECONDS: Final = 3.0


def register(app: typer.Typer) -> None:
    app.command()(trace)


@with_options
def trace(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="X-Request-ID of the answer, or trace id.")
    ],
    control_plane: ControlPlane,
    every: Annotated[
        bool, typer.Option("--all", help="Show a line for every span, even if many are alike.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for spans that have not arrived.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Draw the timeline of a request: router, ticket, prefill, each layer's write, decode.

    Processes whose OTEL_EXPORTER_OTLP_ENDPOINT is the control plane send their spans there; it
    keeps the latest.
    """
    import msgspec

    from kvxfer.cli.timeline import timeline

    with control_plane.connect() as client:
        found = _when_whole(client, request_id, wait)
    if as_json:
        show_json(msgspec.to_builtins(found))
        return
    out.print(timeline(found, width=out.width, every=every), soft_wrap=True)
    if _orphans(found):
        err.print("[yellow]incomplete[/] the spans that began this trace have not arrived")


def _when_whole(
    client: SyncControlPlaneClient, request_id: str, wait: float, clock: Clock = SYSTEM_CLOCK
) -> Trace:
    """Returns the trace once it has not grown for a while, or as it is after `wait` seconds."""
    from kvxfer.errors import UnknownTrace

    give_up = clock.monotonic() + wait
    found: Trace | None = None
    since = clock.monotonic()
    while True:
        try:
            before, found = found, client.trace(request_id)
        except UnknownTrace:
            if clock.monotonic() >= give_up:
                raise
        else:
            if before is None or len(before.spans) != len(found.spans):
                since = clock.monotonic()
            # A trace that ended long ago is complete.
            age = clock.unix() - max(span.end for span in found.spans)
            settled = clock.monotonic() - since >= _QUIET_SECONDS or age > wait
            if clock.monotonic() >= give_up or (settled and not _orphans(found)):
                return found
        clock.sleep(_PAUSE_SECONDS)


def _orphans(trace: Trace) -> bool:
    ids = {span.span_id for span in trace.spans}
    return all(span.parent_id is not None and span.parent_id not in ids for span in trace.spans)
