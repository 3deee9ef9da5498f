"""`python -m tests.deploy`: a table of the chart's value sets and the results of their checks."""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.deploy.chart import VALUE_SETS, render, value_set
from tests.deploy.checks import CHECKS
from tests.deploy.kubernetes_schemas import NEWEST, OLDEST


def main() -> int:
    console = Console(width=max(150, Console().width))
    table = Table(title=f"The chart's value sets, against Kubernetes {OLDEST} and {NEWEST}")
    table.add_column("value set", no_wrap=True)
    table.add_column("objects", justify="right")
    for name in CHECKS:
        table.add_column(name, justify="center")
    kinds: Counter[str] = Counter()
    problems: list[str] = []
    for path in VALUE_SETS:
        release = render(value_set(path), name=path.stem)
        kinds.update(one["kind"] for one in release.objects)
        marks = []
        for name, check in CHECKS.items():
            found = [f"{path.stem}, {name}: {problem}" for problem in check(release)]
            problems += found
            marks.append(f"[red]{len(found)}[/]" if found else "[green]ok[/]")
        table.add_row(path.stem, str(len(release.objects)), *marks)
    console.print(table)
    console.print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), style="dim")
    for problem in problems:
        console.print(problem, style="red", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
