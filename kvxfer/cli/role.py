"""`kvxfer role`: moves an instance to the other side."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvxfer.cli.connection import (
    CaFileOption,
    CertFileOption,
    ControlPlaneOption,
    KeyFileOption,
    TokenFileOption,
    connect,
)
from kvxfer.cli.output import out, show_json


def register(app: typer.Typer) -> None:
    app.command()(role)


def role(
    instance_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    to: Annotated[
        Literal["prefill", "decode", "both"], typer.Argument(metavar="ROLE", show_default=False)
    ],
    control_plane: ControlPlaneOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    cert_file: CertFileOption = None,
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the instance.")] = False,
) -> None:
    """Change an instance's role without a restart: prefill, decode or both.

    New transfers see the new role at once; those that are open go on as they began.
    """
    import msgspec

    from kvxfer.instances import Role

    with connect(control_plane, token_file, ca_file, cert_file, key_file) as client:
        changed = client.change_role(instance_id, Role(to))
    if as_json:
        show_json(msgspec.to_builtins(changed))
    else:
        out.print(f"{changed.instance_id} takes the role {changed.role}", highlight=False)
