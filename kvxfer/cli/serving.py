"""The common part of `kvxfer serve` and `kvxfer router`: options, a listener, its announcement."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.cli.output import err, out
from kvxfer.errors import InvalidArgument, NotBuilt

if TYPE_CHECKING:
    from kvxfer.web.tls import ServerTls

TRUST_PANEL: Final = "Trust"
_SERVER_PACKAGES: Final = ("fastapi", "prometheus_client", "structlog", "uvicorn")

HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
]
AllowAnonymousOption = Annotated[
    bool,
    typer.Option(
        "--allow-anonymous",
        help="Serve other hosts without tokens or API keys.",
        rich_help_panel=TRUST_PANEL,
    ),
]
UrlAsJsonOption = Annotated[bool, typer.Option("--json", help="Print the URL as one line of JSON.")]


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate of a server."""

    tls_cert: Annotated[Path | None, typer.Option(rich_help_panel=TRUST_PANEL)] = None
    """Certificate chain, PEM; turns HTTPS on. Read again when it changes."""
    tls_key: Annotated[
        Path | None,
        typer.Option(show_default="in the certificate's file", rich_help_panel=TRUST_PANEL),
    ] = None
    """Key of the certificate, PEM."""

    def read(self, client_ca: Path | None = None) -> ServerTls | None:
        """Reads the certificate; returns None for HTTP. Raises InvalidArgument."""
        from kvxfer.web.tls import ServerTls

        if self.tls_cert is not None:
            return ServerTls(self.tls_cert, self.tls_key, client_ca)
        for option, file in (("--tls-key", self.tls_key), ("--tls-client-ca", client_ca)):
            if file is not None:
                raise InvalidArgument(f"{option} needs --tls-cert")
        return None


def require_server(what: str) -> None:
    """Raises NotBuilt with the pip command if a package of `kvxfer[server]` is missing."""
    for package in _SERVER_PACKAGES:
        try:
            found = find_spec(package) is not None
        except ValueError:  # a module without a spec stands in its place
            found = False
        if not found:
            raise NotBuilt(
                f"{what} needs {package}, which is not installed: pip install 'kvxfer[server]'"
            )


def listen(
    host: str, port: int, *, anonymous: bool, allowed: bool, what: str, remedy: str
) -> socket:
    """Opens a listener. One that other hosts reach and that serves `anonymous` callers must be
    `allowed`. Raises InvalidArgument, which says that they could use `what`, and `remedy`."""
    from kvxfer.web.listener import bind, is_loopback

    listener = bind(host, port)
    if anonymous and not is_loopback(listener):
        if not allowed:
            listener.close()
            raise InvalidArgument(
                f"every client that reaches {host} could use {what}: {remedy}, or pass "
                "--allow-anonymous to permit that"
            )
        err.print(f"[yellow]warning[/] every client that reaches {host} can use {what}")
    return listener


def announcement(as_json: bool, text: Callable[[str], str]) -> Callable[[str], None]:
    """Returns a function that prints the URL of a server, as `text` makes it or as JSON."""

    def announce(url: str) -> None:
        if as_json:
            sys.stdout.write(json.dumps({"url": url}) + "\n")
            sys.stdout.flush()
        else:
            out.print(text(url), soft_wrap=True)

    return announce
