"""`kvxfer router`: OpenAI's API in front of the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import OptionsOf, with_options
from kvxfer.cli.output import Logs
from kvxfer.cli.serving import (
    TRUST_PANEL,
    AllowAnonymousOption,
    HostOption,
    PortOption,
    Tls,
    UrlAsJsonOption,
    announcement,
    listen,
    require_server,
)
from kvxfer.router.settings import RouterSettings, watch_worker_key
from kvxfer.web.listener import ConnectionLimits


def register(app: typer.Typer) -> None:
    app.command()(router)


@with_options
def router(
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    control_plane: ControlPlane,
    given: Annotated[
        dict[str, Any],
        OptionsOf(
            RouterSettings,
            without=("api_keys", "worker_key", "forward_headers", "allowed_origins"),
            panel="Deadlines and limits",
            handshake=typer.Option(),
        ),
    ],
    limits: Annotated[dict[str, Any], OptionsOf(ConnectionLimits, panel="Deadlines and limits")],
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File of lines NAME KEY: the clients that are served. Read again when it changes.",
            show_default="every client on this host",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    worker_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of the workers (vllm serve --api-key). Read again when it "
            "changes.",
            show_default="none",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    forward_header: Annotated[
        list[str] | None,
        typer.Option(
            help="A client's header that workers also get; may be repeated.", show_default="none"
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin of web pages that may use the router (CORS), or *; may be repeated.",
            show_default="none",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    allow_anonymous: AllowAnonymousOption = False,
    certificate: Tls,
    logs: Logs,
    as_json: UrlAsJsonOption = False,
) -> None:
    """Start a router.

    It serves the API of the inference engines behind it: each request gets a pair of workers from
    the control plane, goes to both, and is answered by decode. Its token at the control plane
    needs the scope router. It prints its URL once it accepts connections, and stops on SIGTERM or
    Ctrl-C.
    """
    require_server("the router")
    from kvxfer.client import ControlPlaneClient
    from kvxfer.router.api_keys import watch_api_keys
    from kvxfer.router.app import create_app
    from kvxfer.tracing.setup import start_tracing
    from kvxfer.web.server import Server

    logs.configure()
    tls = certificate.read()
    settings = RouterSettings(
        api_keys=None if api_keys_file is None else watch_api_keys(api_keys_file),
        worker_key=None if worker_key_file is None else watch_worker_key(worker_key_file),
        forward_headers=tuple(forward_header or ()),
        allowed_origins=tuple(allowed_origin or ()),
        **given,
    )
    own = control_plane.credentials()
    client = ControlPlaneClient(
        control_plane.url, credentials=own, deadline=settings.capacity_seconds
    )
    tracer = start_tracing("router", control_plane=control_plane.url, credentials=own)
    listener = listen(
        host,
        port,
        anonymous=settings.api_keys is None,
        allowed=allow_anonymous,
        what="the fleet",
        remedy="name the API keys it accepts with --api-keys-file",
    )

    def told(url: str) -> str:
        return f"kvxfer router at {url}, over the control plane at {client.url}"

    Server(
        create_app(settings, client, tracer),
        listener,
        announcement(as_json, told),
        tls=tls,
        stop_seconds=settings.stop_seconds,
        limits=ConnectionLimits(**limits),
    ).serve_forever()
