"""`kvxfer serve`: the control plane."""

from __future__ import annotations

import ipaddress
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli.output import err, out
from kvxfer.errors import NotBuilt

_SERVER_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the URL as one line of JSON.")
    ] = False,
) -> None:
    """Start the control plane.

    Workers register with it, routers ask it for pairs. It prints its URL once it accepts
    connections, and stops on SIGTERM or Ctrl-C.
    """
    _require_server()
    from kvxfer.api.app import create_app
    from kvxfer.api.server import ControlPlaneServer
    from kvxfer.api.settings import Settings
    from kvxfer.cluster_key import read_cluster_key
    from kvxfer.http_listener import bind
    from kvxfer.scheduler.choice import make_registry
    from kvxfer.scheduler.registry import LeasePolicy

    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    settings = Settings(
        cluster_key=read_cluster_key(cluster_key_file), transfer_seconds=transfer_seconds
    )
    fleet = make_registry(registry, LeasePolicy(lease_seconds))
    listener = bind(host, port)
    if not _is_loopback(listener.getsockname()[0]):
        err.print(
            f"[yellow]warning[/] whoever reaches {host} can use the control plane: "
            "it does not ask who calls"
        )

    def announce(url: str) -> None:
        if as_json:
            sys.stdout.write(json.dumps({"url": url}) + "\n")
            sys.stdout.flush()
        else:
            out.print(f"kvxfer control plane at {url}, its API at {url}/docs", soft_wrap=True)

    ControlPlaneServer(create_app(settings, fleet), listener, announce).serve_forever()


def _require_server() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in _SERVER_PACKAGES:
            raise
        raise NotBuilt(
            f"the control plane needs {error.name}, which is not installed: "
            "pip install 'kvxfer[server]'"
        ) from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
