"""`kvxfer transfers`: the transfers that hold a reservation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json, show_staleness
from kvxfer.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.transfers import Transfer


def register(app: typer.Typer) -> None:
    app.command()(transfers)


@with_options
def transfers(
    control_plane: ControlPlane,
    instance: Annotated[
        str | None, typer.Option(metavar="ID", help="Transfers from or to this instance.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="The most transfers to list.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List the open transfers, the oldest first."""
    import msgspec

    from kvxfer.client import calls

    with control_plane.connect() as client:
        answer = client.ask(calls.transfers(instance_id=instance, limit=limit))
    found = answer.value
    if as_json:
        stale = {"stale_seconds": answer.stale_seconds}
        show_json({"transfers": msgspec.to_builtins(found), **stale})
        return
    if found:
        out.print(_table(found, SYSTEM_CLOCK.unix()))
    else:
        out.print("no transfer is open")
    show_staleness(answer.stale_seconds)


def _table(transfers: Iterable[Transfer], now: float) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    for name in ("transfer", "request", "model", "prefill", "decode"):
        table.add_column(name, overflow="fold")
    for name in ("prompt tokens", "blocks", "age", "expires in"):
        table.add_column(name, justify="right")
    for transfer in transfers:
        tokens = transfer.prompt_tokens
        table.add_row(
            transfer.transfer_id,
            transfer.request_id,
            transfer.model,
            transfer.prefill.instance_id,
            transfer.decode.instance_id,
            "?" if tokens is None else str(tokens),
            f"{transfer.prefill_blocks} + {transfer.decode_blocks}",
            f"{max(0.0, now - transfer.created_at):.1f} s",
            f"{max(0.0, transfer.expires_at - now):.1f} s",
        )
    return table
