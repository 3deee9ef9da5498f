"""`kvxfer doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what fabrics, NICs, GPUs and limits this host has, and what is missing for each.

    Exit code 1 only where the core cannot work.
    """
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from kvxfer.cli.output import out, show_json
    from kvxfer.doctor.examination import core_works, examine
    from kvxfer.doctor.finding import Status
    from kvxfer.doctor.host import Host

    styles = {
        Status.OK: "green",
        Status.INFO: "dim",
        Status.LIMITED: "yellow",
        Status.ABSENT: "dim",
        Status.BROKEN: "bold red",
    }
    findings = examine(Host())
    works = core_works(findings)
    if as_json:
        show_json({"core_works": works, "findings": [asdict(finding) for finding in findings]})
    else:
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
        out.print(table)
    if not works:
        raise typer.Exit(1)
