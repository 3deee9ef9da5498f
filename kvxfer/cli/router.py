"""`kvxfer router`: OpenAI's API in front of the fleet."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kvxfer.cli.connection import (
    CaFileOption,
    CertFileOption,
    ControlPlaneOption,
    KeyFileOption,
    TokenFileOption,
    credentials,
)
from kvxfer.cli.process_logs import LogFormatOption, LogLevelOption
from kvxfer.cli.serving import (
    TRUST_PANEL,
    AllowAnonymousOption,
    HostOption,
    PortOption,
    TlsCertOption,
    TlsKeyOption,
    UrlAsJsonOption,
    announcement,
    listen,
    require_server,
)
from kvxfer.errors import InvalidArgument

_PATIENCE: Final = "Deadlines and limits"


class RouterHandshake(StrEnum):
    DIRECT = "direct"
    BROKERED = "brokered"


def register(app: typer.Typer) -> None:
    app.command()(router)


def router(
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    control_plane: ControlPlaneOption = None,
    handshake: Annotated[
        RouterHandshake,
        typer.Option(
            help="How block tables get to prefill: from decode's engine, or by the control plane."
        ),
    ] = RouterHandshake.DIRECT,
    attempts: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Pairs that a request may be tried on.", rich_help_panel=_PATIENCE
        ),
    ] = 4,
    first_token_seconds: Annotated[
        float,
        typer.Option(
            help="From a request's arrival to its first token, with all attempts.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 30.0,
    capacity_seconds: Annotated[
        float,
        typer.Option(
            help="A request waits so long for a pair before it is a 503.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 5.0,
    token_seconds: Annotated[
        float,
        typer.Option(
            help="A decode worker that sends no token for so long is given up.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 30.0,
    client_seconds: Annotated[
        float,
        typer.Option(
            help="A client that takes no token for so long is given up.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 60.0,
    stop_seconds: Annotated[
        int,
        typer.Option(
            min=0,
            help="Told to stop, it lets requests under way go on for so long.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 30,
    max_requests: Annotated[
        int,
        typer.Option(min=1, help="Under way at once.", rich_help_panel=_PATIENCE),
    ] = 1024,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Of a request.", rich_help_panel=_PATIENCE)
    ] = 4 << 20,
    bytes_per_token: Annotated[
        float,
        typer.Option(
            help="Of a text prompt whose tokens are not known in time, to reserve blocks by.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 4.0,
    tokenize_seconds: Annotated[
        float,
        typer.Option(
            help="A text prompt waits so long for a worker to say its tokens, which tell where "
            "they are cached; 0 asks no worker.",
            rich_help_panel=_PATIENCE,
        ),
    ] = 0.05,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="Lines of NAME KEY: the clients that are served. Read again when it changes.",
            show_default="everybody on this host",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    worker_key_file: Annotated[
        Path | None,
        typer.Option(
            help="The key that workers ask for (vllm serve --api-key). Read again when it changes.",
            show_default="none",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    forward_header: Annotated[
        list[str] | None,
        typer.Option(
            help="A header of the client that workers get; may be repeated.", show_default="none"
        ),
    ] = None,
    allow_anonymous: AllowAnonymousOption = False,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    cert_file: CertFileOption = None,
    key_file: KeyFileOption = None,
    log_level: LogLevelOption = "warning",
    log_format: LogFormatOption = "text",
    as_json: UrlAsJsonOption = False,
) -> None:
    """Start a router.

    It serves OpenAI's completions and chat completions: each request gets a pair of workers from
    the control plane, goes to both, and is answered from decode. Its token at the control plane
    needs the scope router. It prints its URL once it accepts connections, and stops on SIGTERM or
    Ctrl-C.
    """
    require_server("the router")
    from kvxfer.client import ControlPlaneClient
    from kvxfer.logs import configure_logging
    from kvxfer.router.api_keys import watch_api_keys
    from kvxfer.router.app import create_app
    from kvxfer.router.settings import RouterSettings, watch_worker_key
    from kvxfer.tracing.setup import start_tracing
    from kvxfer.web.server import Server
    from kvxfer.web.tls import ServerTls

    configure_logging(log_level, log_format)
    if tls_key is not None and tls_cert is None:
        raise InvalidArgument("--tls-key needs --tls-cert")
    settings = RouterSettings(
        api_keys=None if api_keys_file is None else watch_api_keys(api_keys_file),
        worker_key=None if worker_key_file is None else watch_worker_key(worker_key_file),
        forward_headers=tuple(forward_header or ()),
        handshake=handshake.value,
        attempts=attempts,
        first_token_seconds=first_token_seconds,
        capacity_seconds=capacity_seconds,
        token_seconds=token_seconds,
        client_seconds=client_seconds,
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
        bytes_per_token=bytes_per_token,
        tokenize_seconds=tokenize_seconds,
    )
    tls = None if tls_cert is None else ServerTls(tls_cert, tls_key)
    own = credentials(token_file, ca_file, cert_file, key_file)
    client = ControlPlaneClient(control_plane, credentials=own, deadline=capacity_seconds)
    tracer = start_tracing("router", control_plane=control_plane, credentials=own)
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
        stop_seconds=stop_seconds,
    ).serve_forever()
