"""`kvxfer serve`: the control plane."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvxfer.api.settings import Settings
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
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.web.listener import ConnectionLimits

# A full collection visits the records of the whole fleet while all requests wait: rarer ones halve
# the p99 with 10,000 instances (docs/design-notes.md).
_GC_THRESHOLDS: Final = (50_000, 50, 100)


def register(app: typer.Typer) -> None:
    app.command()(serve)


@with_options
def serve(
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the cluster key; without it, KVXFER_CLUSTER_KEY."),
    ] = None,
    registry: Annotated[
        str,
        typer.Option(
            envvar="KVXFER_REGISTRY",
            help="Registry of the fleet: embedded (in this process), or the URL of a Redis that "
            "several replicas share: redis://HOST:PORT/DB, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.",
        ),
    ] = "embedded",
    keyspace: Keyspace,
    lease: LeasePolicy,
    given: Annotated[
        dict[str, Any],
        OptionsOf(
            Settings,
            without=("cluster_key", "ticket_keys", "tokens", "tenants"),
            panel=TRUST_PANEL,
            transfer_seconds=typer.Option(),
            weight_update_seconds=typer.Option(),
            max_waiting=typer.Option(),
        ),
    ],
    limits: Annotated[dict[str, Any], OptionsOf(ConnectionLimits, panel=TRUST_PANEL)],
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
            help="YAML or TOML: the scorer that ranks the pairs, and the weights of tenants.",
            show_default="least loaded, near, cached prefix",
        ),
    ] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            envvar="KVXFER_TOKENS_FILE",
            help="File of lines NAME SCOPES TOKEN, one for each caller. Read again when it "
            "changes.",
            show_default="every caller on this host may call everything",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    allow_anonymous: AllowAnonymousOption = False,
    ticket_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the keys of tickets, one per line; the first signs. Read again when "
            "it changes.",
            show_default="one derived from the cluster key",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    certificate: Tls,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Serve only clients with a certificate of this CA.",
            rich_help_panel=TRUST_PANEL,
        ),
    ] = None,
    logs: Logs,
    as_json: UrlAsJsonOption = False,
) -> None:
    """Start the control plane.

    Workers register with it, routers ask it for pairs. It prints its URL once it accepts
    connections, and stops on SIGTERM or Ctrl-C.
    """
    require_server("the control plane")
    from kvxfer.api.app import create_app
    from kvxfer.cluster_key import read_cluster_key
    from kvxfer.scheduler.choice import make_leader, make_registry
    from kvxfer.scheduler.pairing_file import read_pairing_file
    from kvxfer.scheduler.scaling.autoscaler import Autoscaler
    from kvxfer.scheduler.scaling.backends import make_backend
    from kvxfer.scheduler.scaling.policy_file import read_scaling_file
    from kvxfer.ticket import watch_ticket_keys
    from kvxfer.web.listener import url_of
    from kvxfer.web.server import Server
    from kvxfer.web.tokens import watch_tokens

    logs.configure()
    tls = certificate.read(tls_client_ca)
    pairing = None if pairing_policy is None else read_pairing_file(pairing_policy)
    settings = Settings(
        cluster_key=read_cluster_key(cluster_key_file),
        ticket_keys=None if ticket_keys_file is None else watch_ticket_keys(ticket_keys_file),
        tokens=None if tokens_file is None else watch_tokens(tokens_file),
        tenants={} if pairing is None else pairing.tenants,
        **given,
    )
    scorer = None if pairing is None else pairing.scorer
    fleet = make_registry(registry, lease, scorer, keyspace)
    scaling = None if scaling_policy is None else read_scaling_file(scaling_policy)
    listener = listen(
        host,
        port,
        anonymous=settings.tokens is None,
        allowed=allow_anonymous,
        what="the control plane",
        remedy="name the tokens it accepts with --tokens-file",
    )
    autoscaler = None
    if scaling is not None:
        autoscaler = Autoscaler(
            fleet,
            scaling,
            policy_name=str(scaling_policy),
            leader=make_leader(registry, interval=scaling.interval, keyspace=keyspace),
            backend=make_backend(
                scaling.backend,
                fleet,
                control_plane=url_of(listener, tls=tls is not None),
                cluster_key_file=cluster_key_file,
                ticket_keys_file=ticket_keys_file,
            ),
        )

    def told(url: str) -> str:
        return f"kvxfer control plane at {url}, its API at {url}/docs"

    gc.set_threshold(*_GC_THRESHOLDS)
    app = create_app(settings, fleet, autoscaler=autoscaler)
    connections = ConnectionLimits(**limits)
    Server(app, listener, announcement(as_json, told), tls=tls, limits=connections).serve_forever()
