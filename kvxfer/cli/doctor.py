"""`kvxfer doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.doctor.finding import Finding
    from kvxfer.topology import Sysfs, Topology


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    sysfs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draw the topology of a recorded tree instead: what stands for /, or a copy of "
            "/sys. Nothing else is checked.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what fabrics, NICs, GPUs and limits this host has, and what is missing for each.

    Draws how GPUs and NICs belong together, too. Exit code 1 only where the core cannot work.
    """
    from dataclasses import asdict

    from kvxfer.cli.output import out, show_json
    from kvxfer.doctor.examination import core_works, examine
    from kvxfer.doctor.host import Host
    from kvxfer.topology import Sysfs, domain_groups, read_topology
    from kvxfer.topology.document import as_document

    topology = read_topology(Sysfs() if sysfs is None else _recorded(sysfs))
    document = as_document(topology, domain_groups(topology))
    if sysfs is not None:
        if as_json:
            show_json(document)
        else:
            _draw(topology)
        return

    findings = examine(Host())
    works = core_works(findings)
    if as_json:
        show_json(
            {"core_works": works, "findings": [asdict(finding) for finding in findings], **document}
        )
    else:
        out.print(_findings_table(findings))
        out.print()
        _draw(topology)
    if not works:
        raise typer.Exit(1)


def _recorded(folder: Path) -> Sysfs:
    from kvxfer.topology import Sysfs

    try:
        return Sysfs.recorded(folder)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error), param_hint="--sysfs") from error


def _draw(topology: Topology) -> None:
    from kvxfer.cli.output import out
    from kvxfer.topology import domain_groups
    from kvxfer.topology.drawing import groups_table, topology_tree

    out.print(topology_tree(topology))
    out.print()
    out.print(groups_table(topology, domain_groups(topology)))


def _findings_table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from kvxfer.doctor.finding import Status

    styles = {
        Status.OK: "green",
        Status.INFO: "dim",
        Status.LIMITED: "yellow",
        Status.ABSENT: "dim",
        Status.BROKEN: "bold red",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    area = None
    for finding in findings:
        detail = Text(finding.detail)
        if finding.remedy is not None:
            detail.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(
            finding.area.value if finding.area is not area else "",
            Text(finding.status.value, style=styles[finding.status]),
            Text(finding.name),
            detail,
        )
        area = finding.area
    return table
