"""`kvxfer role`: changes the role of an instance."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json


def register(app: typer.Typer) -> None:
    app.command()(role)


@with_options
def role(
    instance_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    to: Annotated[
        Literal["prefill", "decode", "both"], typer.Argument(metavar="ROLE", show_default=False)
    ],
    control_plane: ControlPlane,
    as_json: Annotated[bool, typer.Option("--json", help="Print the instance.")] = False,
) -> None:
    """Change an instance's role without a restart: prefill, decode or both.

    New transfers use the new role at once; open transfers go on as they began.
    """
    import msgspec

    from kvxfer.instances import Role

    with control_plane.connect() as client:
        changed = client.change_role(instance_id, Role(to))
    if as_json:
        show_json(msgspec.to_builtins(changed))
    else:
        out.print(f"{changed.instance_id} takes the role {changed.role}", highlight=False)
