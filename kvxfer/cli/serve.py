"""`kvxfer serve`: the control plane."""

from __future__ import annotations

import gc
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from kvxfer.cli.output import err, out
from kvxfer.cli.process_logs import LogFormatOption, LogLevelOption
from kvxfer.errors import InvalidArgument, NotBuilt

_SERVER_PACKAGES: Final = ("fastapi", "prometheus_client", "structlog", "uvicorn")
_TRUST: Final = "Trust"
# A full collection walks over the records of the whole fleet while everybody waits: rarer ones
# halve the p99 with 10,000 instances (docs/performance.md).
_GC_THRESHOLDS: Final = (50_000, 50, 100)


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8080,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the cluster key; KVXFER_CLUSTER_KEY without it."),
    ] = None,
    registry: Annotated[
        str,
        typer.Option(
            envvar="KVXFER_REGISTRY",
            help="Where the fleet is kept: embedded (in this process), or the URL of a Redis that "
            "several replicas share: redis://HOST:PORT/DB, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.",
        ),
    ] = "embedded",
    lease_seconds: Annotated[
        float, typer.Option(help="A worker without a heartbeat for this long is gone.")
    ] = 6.0,
    transfer_seconds: Annotated[
        float, typer.Option(help="How long a ticket is valid and its reservation counts.")
    ] = 60.0,
    scaling_policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or TOML: targets, bounds and backend of the autoscaler.",
            show_default="no autoscaler",
        ),
    ] = None,
    pairing_policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or TOML: which scorer ranks the pairs, and its weights.",
            show_default="least loaded, near, cached prefix",
        ),
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVXFER_TOKENS_FILE",
            help="Lines of NAME SCOPES TOKEN: who may call what. Read again when it changes.",
            show_default="everybody on this host may call everything",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous",
            help="Without a tokens file, serve other hosts all the same.",
            rich_help_panel=_TRUST,
        ),
    ] = False,
    ticket_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys of the tickets, one per line; the first signs. Read again when it changes.",
            show_default="one that follows from the cluster key",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Certificate chain, PEM: HTTPS. Read again when it changes.",
            rich_help_panel=_TRUST,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            help="Its key.", show_default="in the certificate's file", rich_help_panel=_TRUST
        ),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Only clients with a certificate of this CA are served.", rich_help_panel=_TRUST
        ),
    ] = None,
    rate_limit: Annotated[
        float,
        typer.Option(
            min=0,
            help="Requests per second of one token at one address; 0 is no limit.",
            rich_help_panel=_TRUST,
        ),
    ] = 2000.0,
    max_body_bytes: Annotated[
        int,
        typer.Option(
            min=1, help="Of a request; block tables may have 1.5 MiB.", rich_help_panel=_TRUST
        ),
    ] = 1 << 20,
    log_level: LogLevelOption = "warning",
    log_format: LogFormatOption = "text",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the URL as one line of JSON.")
    ] = False,
) -> None:
    """Start the control plane.

    Workers register with it, routers ask it for pairs. It prints its URL once it accepts
    connections, and stops on SIGTERM or Ctrl-C.
    """
    require_server("the control plane")
    from kvxfer.api.app import create_app
    from kvxfer.api.server import ControlPlaneServer
    from kvxfer.api.settings import Settings
    from kvxfer.api.tls import ServerTls
    from kvxfer.api.tokens import watch_tokens
    from kvxfer.cluster_key import read_cluster_key
    from kvxfer.http_listener import bind, is_loopback, url_of
    from kvxfer.logs import configure_logging
    from kvxfer.scheduler.choice import make_leader, make_registry
    from kvxfer.scheduler.pairing_file import read_pairing_file
    from kvxfer.scheduler.registry import LeasePolicy
    from kvxfer.scheduler.scaling.autoscaler import Autoscaler
    from kvxfer.scheduler.scaling.backends import make_backend
    from kvxfer.scheduler.scaling.policy_file import read_scaling_file
    from kvxfer.ticket import watch_ticket_keys

    configure_logging(log_level, log_format)
    if tls_cert is None and (tls_key or tls_client_ca):
        raise InvalidArgument("--tls-key and --tls-client-ca need --tls-cert")
    settings = Settings(
        cluster_key=read_cluster_key(cluster_key_file),
        ticket_keys=None if ticket_keys_file is None else watch_ticket_keys(ticket_keys_file),
        tokens=None if tokens_file is None else watch_tokens(tokens_file),
        transfer_seconds=transfer_seconds,
        rate_limit=rate_limit,
        max_body_bytes=max_body_bytes,
    )
    tls = None if tls_cert is None else ServerTls(tls_cert, tls_key, tls_client_ca)
    scorer = None if pairing_policy is None else read_pairing_file(pairing_policy)
    fleet = make_registry(registry, LeasePolicy(lease_seconds), scorer)
    scaling = None if scaling_policy is None else read_scaling_file(scaling_policy)
    listener = bind(host, port)
    if settings.tokens is None and not is_loopback(listener):
        if not allow_anonymous:
            listener.close()
            raise InvalidArgument(
                f"whoever reaches {host} could use the control plane: name the tokens it accepts "
                "with --tokens-file, or say --allow-anonymous where everybody who can reach it may"
            )
        err.print(f"[yellow]warning[/] whoever reaches {host} can use the control plane")
    autoscaler = None
    if scaling is not None:
        autoscaler = Autoscaler(
            fleet,
            scaling,
            policy_name=str(scaling_policy),
            leader=make_leader(registry, interval=scaling.interval),
            backend=make_backend(
                scaling.backend,
                fleet,
                control_plane=url_of(listener, tls=tls is not None),
                cluster_key_file=cluster_key_file,
                ticket_keys_file=ticket_keys_file,
            ),
        )

    def announce(url: str) -> None:
        if as_json:
            sys.stdout.write(json.dumps({"url": url}) + "\n")
            sys.stdout.flush()
        else:
            out.print(f"kvxfer control plane at {url}, its API at {url}/docs", soft_wrap=True)

    gc.set_threshold(*_GC_THRESHOLDS)
    app = create_app(settings, fleet, autoscaler=autoscaler)
    ControlPlaneServer(app, listener, announce, tls=tls).serve_forever()


def require_server(what: str) -> None:
    """Raises NotBuilt with the pip command where a package of `kvxfer[server]` is missing."""
    for package in _SERVER_PACKAGES:
        try:
            found = find_spec(package) is not None
        except ValueError:  # it was tried before, and taken out
            found = False
        if not found:
            raise NotBuilt(
                f"{what} needs {package}, which is not installed: pip install 'kvxfer[server]'"
            )
