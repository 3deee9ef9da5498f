"""How every subcommand reaches the control plane: one set of options, one client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from kvxfer.client import Credentials, SyncControlPlaneClient

_PANEL: Final = "Control plane"

ControlPlaneOption = Annotated[
    str | None,
    typer.Option(
        envvar="KVXFER_CONTROL_PLANE",
        help="URL of `kvxfer serve`.",
        show_default="http://127.0.0.1:8080",
        rich_help_panel=_PANEL,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="KVXFER_TOKEN_FILE",
        help="File that holds the bearer token; KVXFER_TOKEN without it.",
        rich_help_panel=_PANEL,
    ),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="KVXFER_CA_FILE",
        help="CA of the control plane's certificate.",
        show_default="those of the system",
        rich_help_panel=_PANEL,
    ),
]
CertFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="KVXFER_CERT_FILE", help="Client certificate, PEM.", rich_help_panel=_PANEL
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="KVXFER_KEY_FILE",
        help="Its key.",
        show_default="in the certificate's file",
        rich_help_panel=_PANEL,
    ),
]

# A person waits: one that is starting up gets this long, one that is away is an error then.
_DEADLINE_SECONDS: Final = 2.0


def credentials(
    token_file: Path | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> Credentials:
    """Those of the options, whose variables of the environment typer has read already."""
    import os

    from kvxfer.client import Credentials

    return Credentials(
        token=None if token_file else os.environ.get("KVXFER_TOKEN") or None,
        token_file=token_file,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
    )


def connect(
    control_plane: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
) -> SyncControlPlaneClient:
    from kvxfer.client import SyncControlPlaneClient

    return SyncControlPlaneClient(
        control_plane,
        credentials=credentials(token_file, ca_file, cert_file, key_file),
        deadline=_DEADLINE_SECONDS,
    )
