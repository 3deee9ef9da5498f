"""All attacks, and the table of their outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from rich.table import Table

from . import answers, control_plane, floods, members, outsiders, transfers
from .attack import Fabric, Flood, Row, run, run_flood
from .on_path import Altered, altered_stream
from .pair import workers

FABRICS: tuple[Fabric, ...] = ("tcp", "local")
TRIALS = 16


def all_rows(rng: random.Random, fabrics: tuple[Fabric, ...] = FABRICS) -> Iterator[Row]:
    """Runs every attack on each of its fabrics, with one pair of workers per fabric."""
    for fabric in fabrics:
        with workers(fabric) as pair:
            for module in (outsiders, answers, members, transfers, floods):
                for attack in module.ATTACKS:
                    if fabric not in attack.fabrics:
                        continue
                    act: Callable[..., Row] = run_flood if isinstance(attack, Flood) else run
                    yield act(attack, pair, rng)
    with control_plane.control_plane() as plane:
        for name, call in control_plane.ATTACKS:
            yield control_plane.run(name, call, plane, rng)


def all_altered(rng: random.Random) -> Iterator[Altered]:
    for checksums in (False, True):
        for place in ("page", "header"):
            yield altered_stream(place, TRIALS, rng, checksums=checksums)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Attacks")
    for column in ("attack", "fabric"):
        table.add_column(column)
    for column in ("attempts", "refused", "counted"):
        table.add_column(column, justify="right")
    table.add_column("as", overflow="fold")
    for column in ("bytes changed", "honest share", "memory", "fds"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            row.fabric,
            str(row.attempts),
            str(row.refused),
            str(row.counted) if row.metric != "-" else "-",
            row.metric,
            str(row.changed),
            "-" if row.honest_share is None else f"{row.honest_share:.0%}",
            f"{row.memory_growth / 2**20:+.1f} MiB",
            f"{row.fds_growth:+d}",
            style="red" if row.problems else None,
        )
    return table


def altered_table(found: list[Altered]) -> Table:
    table = Table(title="One bit of an unencrypted tcp stream altered on the way")
    for column in ("where", "checksums"):
        table.add_column(column)
    for column in ("transfers", "named error", "wrong pages, unnoticed", "harmless", "elsewhere"):
        table.add_column(column, justify="right")
    table.add_column("errors", overflow="fold")
    for one in found:
        table.add_row(
            one.place,
            "on" if one.checksums else "off",
            str(one.noticed + one.unnoticed + one.harmless),
            str(one.noticed),
            str(one.unnoticed),
            str(one.harmless),
            f"{one.elsewhere:,} B",
            ", ".join(sorted(one.errors)),
        )
    return table
