"""`kvxfer worker`: the reference engine as a prefill or decode worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import OptionsOf, with_options
from kvxfer.cli.output import Logs, out
from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.reference.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from kvxfer.reference.worker.process import Ready

# Engine options that have a separate command-line option.
_OPTIONS: Final = {"fabrics": "--fabrics", "host": "--host", "peer_timeout": "--peer-timeout"}
PACKAGES = ("fastapi", "uvicorn", "structlog", "torch", "safetensors")


def register(app: typer.Typer) -> None:
    app.command()(worker)


@with_options
def worker(
    *,
    control_plane: ControlPlane,
    given: Annotated[
        dict[str, Any],
        OptionsOf(
            WorkerSettings,
            without=(
                *("cluster_key", "control_plane", "credentials", "ticket_keys"),
                *("options", "labels"),
            ),
            instance_id=typer.Option(envvar="KVXFER_INSTANCE_ID", show_default="made up"),
            model=typer.Option(show_default="a small model with seeded weights and byte tokens"),
            gpu=typer.Option(show_default="host memory"),
            threads=typer.Option(show_default="torch's choice"),
        ),
    ],
    fabrics: Annotated[
        str | None,
        typer.Option(
            help="Fabrics that the engine may use: local, verbs, ofi, tcp.",
            show_default="all that this host has",
        ),
    ] = None,
    peer_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            envvar="KVXFER_PEER_TIMEOUT",
            help="Time without a heartbeat after which the other side counts as frozen; use more "
            "if cores are overcommitted.",
            show_default="0.7",
        ),
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Any other option of the transfer engine, such as exclude_nics=mlx5_8 or "
            "traffic_class=106; commas separate the items of a list. May be repeated.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Place of the worker, as NAME=VALUE: zone, rack, host, numa. May be repeated.",
            show_default="host=the host's name",
        ),
    ] = None,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the cluster key; without it, KVXFER_CLUSTER_KEY."),
    ] = None,
    ticket_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the keys of tickets, one per line. Read again when it changes.",
            show_default="one derived from the cluster key",
        ),
    ] = None,
    logs: Logs,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print its addresses as one line of JSON.")
    ] = False,
) -> None:
    """Start a worker of the reference engine.

    It registers with the control plane and serves OpenAI-style completions whose KV cache moves
    from prefill to decode. It prints its addresses once it accepts requests, and stops on SIGTERM,
    on Ctrl-C, or when it has been drained.
    """
    require_packages("a worker", PACKAGES)
    import asyncio
    import dataclasses

    from kvxfer.cluster_key import read_cluster_key
    from kvxfer.engine.operator_options import parse_options
    from kvxfer.ticket import watch_ticket_keys

    logs.configure()
    settings = WorkerSettings(
        cluster_key=read_cluster_key(cluster_key_file),
        control_plane=control_plane.url,
        credentials=control_plane.credentials(),
        ticket_keys=None if ticket_keys_file is None else watch_ticket_keys(ticket_keys_file),
        options=parse_options(
            {"fabrics": fabrics, "peer_timeout": peer_timeout, **_engine_options(engine_option)},
            lambda name: _OPTIONS.get(name, f"--engine-option {name}"),
        ),
        labels=dict(_label(text) for text in label or ()),
        **given,
    )

    # Imports torch, which takes seconds.
    from kvxfer.reference.worker.process import serve_worker

    def announce(ready: Ready) -> None:
        if as_json:
            sys.stdout.write(json.dumps(dataclasses.asdict(ready)) + "\n")
            sys.stdout.flush()
        else:
            out.print(
                f"{ready.role} worker {ready.instance_id} of {ready.model} at "
                f"{ready.http_address}, its engine at {ready.engine_address}",
                soft_wrap=True,
                highlight=False,
            )

    asyncio.run(serve_worker(settings, announce))


def _engine_options(given: list[str] | None) -> dict[str, str]:
    from kvxfer.engine.operator_options import OPERATOR_OPTIONS

    there = sorted({*OPERATOR_OPTIONS} - {*_OPTIONS})
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        known = name in there or f"tuning.{name}" in there  # parse_options() refuses the latter
        if not equals or not known or name in found:
            raise InvalidArgument(
                f"--engine-option is {text!r}; write it as NAME=VALUE, once for each of "
                f"{', '.join(there)}"
            )
        found[name] = value
    return found


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidArgument(f"--label is {text!r}; write it as NAME=VALUE, such as zone=eu-1a")
    return name, value


def require_packages(what: str, packages: tuple[str, ...]) -> None:
    """Raises NotBuilt with the pip command if one of `kvxfer[demo]`'s packages is missing."""
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise NotBuilt(
                f"{what} needs {package}, which is not installed: pip install 'kvxfer[demo]'"
            )
