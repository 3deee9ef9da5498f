"""`kvxfer worker`: the reference engine as a prefill or decode worker."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.connection import (
    CaFileOption,
    CertFileOption,
    ControlPlaneOption,
    KeyFileOption,
    TokenFileOption,
    credentials,
)
from kvxfer.cli.output import out
from kvxfer.cli.process_logs import LogFormatOption, LogLevelOption
from kvxfer.errors import InvalidArgument, NotBuilt

if TYPE_CHECKING:
    from kvxfer.reference.worker.process import Ready

PACKAGES = ("fastapi", "uvicorn", "structlog", "torch", "safetensors")


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def register(app: typer.Typer) -> None:
    app.command()(worker)


def worker(
    role: Annotated[WorkerRole, typer.Option(help="Which side of transfers it takes.")],
    control_plane: ControlPlaneOption = None,
    instance_id: Annotated[
        str | None,
        typer.Option(
            envvar="KVXFER_INSTANCE_ID", help="Its name in the cluster.", show_default="made up"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on, and to be reached at.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of HTTP; 0 takes any free one.")] = 0,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks, of 16 tokens each.")] = 1024,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face checkpoint folder of a Llama model.",
            show_default="a small model with seeded weights and byte tokens",
        ),
    ] = None,
    fabrics: Annotated[
        str | None,
        typer.Option(
            help="What the engine may use: local, verbs, ofi, tcp.",
            show_default="all that this host has",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch.", show_default="torch's choice")
    ] = None,
    peer_timeout: Annotated[
        float,
        typer.Option(
            min=0.2,  # two heartbeats
            max=3600,
            envvar="KVXFER_PEER_TIMEOUT",
            help="Seconds without a heartbeat after which the other side counts as frozen; more "
            "where cores are overcommitted.",
        ),
    ] = 0.7,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Check every transfer by a checksum of its blocks.")
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Where it runs, as NAME=VALUE: zone, rack, host, numa. May be repeated.",
            show_default="host=the host's name",
        ),
    ] = None,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the cluster key; KVXFER_CLUSTER_KEY without it."),
    ] = None,
    ticket_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys of the tickets, one per line. Read again when it changes.",
            show_default="one that follows from the cluster key",
        ),
    ] = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    cert_file: CertFileOption = None,
    key_file: KeyFileOption = None,
    log_level: LogLevelOption = "warning",
    log_format: LogFormatOption = "text",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print its addresses as one line of JSON.")
    ] = False,
) -> None:
    """Start a worker of the reference engine.

    It registers with the control plane and serves OpenAI-style completions whose KV cache moves
    from prefill to decode. It prints its addresses once it takes requests, and stops on SIGTERM,
    Ctrl-C, or when it has been drained.
    """
    require_packages("a worker", PACKAGES)
    import asyncio
    import dataclasses

    from kvxfer.cluster_key import read_cluster_key

    cluster_key = read_cluster_key(cluster_key_file)

    from kvxfer.instances import Role
    from kvxfer.logs import configure_logging
    from kvxfer.reference.worker.process import WorkerSettings, serve_worker
    from kvxfer.ticket import watch_ticket_keys

    configure_logging(log_level, log_format)
    settings = WorkerSettings(
        role=Role(role),
        cluster_key=cluster_key,
        control_plane=control_plane,
        credentials=credentials(token_file, ca_file, cert_file, key_file),
        ticket_keys=None if ticket_keys_file is None else watch_ticket_keys(ticket_keys_file),
        instance_id=instance_id,
        host=host,
        port=port,
        blocks=blocks,
        model=model,
        fabrics=(
            None
            if fabrics is None
            else tuple(name.strip() for name in fabrics.split(",") if name.strip())
        ),
        threads=threads,
        peer_timeout=peer_timeout,
        checksums=checksums,
        labels=dict(_label(text) for text in label or ()),
    )

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


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidArgument(f"--label is {text!r}; write it as NAME=VALUE, such as zone=eu-1a")
    return name, value


def require_packages(what: str, packages: tuple[str, ...]) -> None:
    """Raises NotBuilt with the pip command where one of `kvxfer[demo]`'s packages is missing."""
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise NotBuilt(
                f"{what} needs {package}, which is not installed: pip install 'kvxfer[demo]'"
            )
