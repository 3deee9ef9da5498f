"""`kvxfer doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.doctor.finding import Finding
    from kvxfer.doctor.host import Host
    from kvxfer.topology import Sysfs, Topology


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    sysfs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draw the topology of a recorded tree instead: a folder in place of /, or a copy "
            "of /sys. Nothing else is checked.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Look at each RDMA NIC more closely, and send bytes from this process to itself "
            "through each of them, and over tcp and local. Run it as root to read everything.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write what --probe finds to this file, as JSON, for a bug report."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what fabrics, NICs, GPUs and limits this host has, and what is missing for each.

    It also draws which GPUs and NICs belong together. The exit code is 1 only if the core cannot
    work.
    """
    from dataclasses import asdict

    from kvxfer.cli.output import out, show_json
    from kvxfer.doctor.examination import core_works, examine
    from kvxfer.doctor.host import Host
    from kvxfer.topology import Sysfs, domain_groups, read_topology
    from kvxfer.topology.document import as_document

    probe = probe or report is not None
    if probe and sysfs is not None:
        raise typer.BadParameter("a recorded tree cannot be probed", param_hint="--sysfs")
    if report is not None:
        _check_report(report)
    topology = read_topology(Sysfs() if sysfs is None else _recorded(sysfs))
    document = as_document(topology, domain_groups(topology))
    if sysfs is not None:
        if as_json:
            show_json(document)
        else:
            _draw(topology)
        return

    findings = examine(Host())
    probed: dict[str, Any] = {}
    if probe:
        more, probed = _probed(Host())
        findings += more
    works = core_works(findings)
    document = {
        **probed,
        "core_works": works,
        "findings": [asdict(finding) for finding in findings],
        **document,
    }
    if as_json:
        show_json(document)
    else:
        out.print(_findings_table(findings))
        out.print()
        _draw(topology)
    if report is not None:
        _write_report(report, document)
    if not works:
        raise typer.Exit(1)


def _probed(host: Host) -> tuple[list[Finding], dict[str, Any]]:
    """Returns the findings of a closer look, and the other members of a report."""
    from dataclasses import asdict

    from kvxfer.cli.output import err
    from kvxfer.doctor.devices import cuda_device_count
    from kvxfer.doctor.examination import Hardware, loopback_findings, send_loopbacks, software

    hardware = Hardware.read(host)
    try:
        gpus = cuda_device_count()
    except OSError:
        gpus = 0
    err.print("sending bytes through each NIC and GPU, and over tcp and local …", style="dim")
    loopbacks = send_loopbacks(hardware.nics, gpus)
    findings = [*hardware.findings(), *loopback_findings(loopbacks)]
    return findings, {
        "software": software(),
        "hardware": asdict(hardware),
        "loopbacks": [asdict(each) for each in loopbacks],
    }


def _check_report(file: Path) -> None:
    """Checks the file before the probe, so that no findings are lost."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise InvalidArgument(
            f"--report {file}: not a file in a directory that exists; name another"
        )


def _write_report(file: Path, document: dict[str, Any]) -> None:
    import json

    from kvxfer.cli.output import err

    try:
        file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"--report {file} cannot be written: {error.strerror}; name another file"
        ) from error
    err.print(f"written: {file}", soft_wrap=True, highlight=False)


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
