"""The connection of every subcommand to the control plane: one set of options, one client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from kvxfer.client import Credentials, SyncControlPlaneClient

_PANEL: Final = "Control plane"
# A person waits: a control plane that is starting up, or busy, gets this long before an error.
_DEADLINE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """The control plane that options or environment variables name."""

    url: Annotated[
        str | None,
        typer.Option(
            "--control-plane",
            envvar="KVXFER_CONTROL_PLANE",
            show_default="http://127.0.0.1:8080",
            rich_help_panel=_PANEL,
        ),
    ] = None
    """URL of `kvxfer serve`; URLs of several replicas, separated by commas."""
    token_file: Annotated[
        Path | None, typer.Option(envvar="KVXFER_TOKEN_FILE", rich_help_panel=_PANEL)
    ] = None
    """File with the bearer token; without it, KVXFER_TOKEN."""
    ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVXFER_CA_FILE", show_default="those of the system", rich_help_panel=_PANEL
        ),
    ] = None
    """CA of the control plane's certificate."""
    cert_file: Annotated[
        Path | None, typer.Option(envvar="KVXFER_CERT_FILE", rich_help_panel=_PANEL)
    ] = None
    """Client certificate, PEM."""
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVXFER_KEY_FILE",
            show_default="in the certificate's file",
            rich_help_panel=_PANEL,
        ),
    ] = None
    """Key of the client certificate, PEM."""

    def credentials(self) -> Credentials:
        import os

        from kvxfer.client import Credentials

        return Credentials(
            token=None if self.token_file else os.environ.get("KVXFER_TOKEN") or None,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )

    def connect(self) -> SyncControlPlaneClient:
        from kvxfer.client import SyncControlPlaneClient

        return SyncControlPlaneClient(
            self.url, credentials=self.credentials(), deadline=_DEADLINE_SECONDS
        )
