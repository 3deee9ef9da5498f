"""`kvxfer drain`: lets an instance finish what it has, and waits until it has left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.cli.connection import (
    CaFileOption,
    CertFileOption,
    ControlPlaneOption,
    KeyFileOption,
    TokenFileOption,
    connect,
)
from kvxfer.cli.output import err, out, show_json

if TYPE_CHECKING:
    from kvxfer.client import SyncControlPlaneClient
    from kvxfer.instances import Instance

_POLL_SECONDS: Final = 0.5
# A worker hears of its deadline with a heartbeat, and then has to stop.
_GRACE_SECONDS: Final = 15.0


def register(app: typer.Typer) -> None:
    app.command()(drain)


def drain(
    instance_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds it may take; then it leaves all the same.")
    ] = 60.0,
    wait: Annotated[bool, typer.Option(help="Wait until it has left.")] = True,
    control_plane: ControlPlaneOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    cert_file: CertFileOption = None,
    key_file: KeyFileOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the instance as it was told or last seen.")
    ] = False,
) -> None:
    """Drain an instance: it gets nothing new, finishes what it has, and leaves.

    Again on an instance that drains it sets the deadline anew. An instance that is still there
    15 s after its deadline is exit code 1.
    """
    import msgspec

    with connect(control_plane, token_file, ca_file, cert_file, key_file) as client:
        told = last = client.drain(instance_id, deadline_seconds=deadline)
        if wait:
            with err.status("") as status:
                for last in _until_gone(client, told, deadline):
                    status.update(_progress(last))
    if as_json:
        show_json({"left": wait, "instance": msgspec.to_builtins(last)})
    elif wait:
        out.print(f"{instance_id} has left", highlight=False)
    else:
        out.print(_progress(last), highlight=False)


def _until_gone(
    client: SyncControlPlaneClient, instance: Instance, deadline: float
) -> Iterator[Instance]:
    """The instance again and again while it is there. Raises DeadlineExceeded."""
    from kvxfer.errors import DeadlineExceeded, UnknownInstance

    give_up = time.monotonic() + deadline + _GRACE_SECONDS
    epoch = instance.epoch
    while instance.epoch == epoch:
        yield instance
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"instance {instance.instance_id!r} is still there {_GRACE_SECONDS:g} s after its "
                f"deadline of {deadline:g} s; stop its worker"
            )
        time.sleep(_POLL_SECONDS)
        try:
            instance = client.instance(instance.instance_id)
        except UnknownInstance:
            return


def _progress(instance: Instance) -> str:
    left = max(0.0, (instance.drain_deadline or 0.0) - time.time())
    return (
        f"{instance.instance_id} drains: {instance.load.running} running, "
        f"{instance.load.waiting} waiting, {instance.reserved.transfers} transfers open, "
        f"{left:.0f} s left"
    )
