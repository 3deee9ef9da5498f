"""One frame of `kvxfer top`: an overview as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.overview import InstanceSummary, Overview, RoleSummary, ScalingStep

_ROLE_STYLES: Final = {"prefill": "cyan", "decode": "yellow", "both": "magenta"}
_STATE_STYLES: Final = {"joining": "blue", "ready": "green", "draining": "red"}
_DIRECTION_STYLES: Final = {"up": "green", "down": "yellow", "hold": "dim"}
_BAR: Final = 20
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
# Limits of the rows of lists: they share the lines that the rest leaves of a terminal.
_LEAST_ROWS: Final = 3
_SMALL_ROWS: Final = 5
_UNBOUNDED_ROWS: Final = 50
_FIXED_LINES: Final = 12


def frame(
    overview: Overview, *, height: int | None, trouble: str = "", trouble_seconds: float = 0.0
) -> RenderableType:
    """Draws what fits into `height` lines; if None, up to 50 rows of each list."""
    small = _UNBOUNDED_ROWS if height is None else _SMALL_ROWS
    parts: list[RenderableType] = [_headline(overview)]
    if trouble:
        words = f"stale for {trouble_seconds:.0f} s: {trouble}"
        parts.append(Text(words, style="black on yellow", no_wrap=True, overflow="ellipsis"))
    elif overview.stale_seconds is not None:
        words = (
            f"stale: this was known {overview.stale_seconds:.1f} s ago; the control plane cannot "
            "reach its registry"
        )
        parts.append(Text(words, style="black on yellow"))
    parts += [Text(), _roles(overview.roles), Text(), _traffic(overview, small)]
    parts += _decisions(overview)
    rows = _UNBOUNDED_ROWS
    if height is not None:
        taken = _FIXED_LINES + min(small, max(len(overview.pairs), len(overview.transfers)))
        rows = max(height - taken - len(parts), _LEAST_ROWS)
    parts += [Text(), _instances(overview, rows)]
    return Group(*parts)


def bytes_per_second(value: float) -> str:
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}/s"


def _headline(overview: Overview) -> Text:
    rate = sum(each.bytes_per_second for each in overview.fabrics)
    fabrics = ", ".join(
        f"{each.fabric} {bytes_per_second(each.bytes_per_second)}" for each in overview.fabrics
    )
    matching, total = overview.matching, overview.total
    return Text.assemble(
        ("kvxfer  ", "bold"),
        f"{total} instances" if matching == total else f"{matching} of {total} instances",
        f"   {overview.transfers_open} open transfers",
        f"   {bytes_per_second(rate)}",
        (f" ({fabrics})" if fabrics else "", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _roles(roles: Iterable[RoleSummary]) -> Table:
    table = _table(
        "role",
        "ready",
        "KV blocks in use",
        numbers=("run + wait", "requests/s", "tokens/s", "TTFT p90", "ITL p90"),
    )
    for role in roles:
        others = [
            f"{count} {state}"
            for state, count in (("joining", role.joining), ("draining", role.draining))
            if count
        ]
        if not (role.ready or others) and role.role == "both":
            continue
        table.add_row(
            Text(role.role, _ROLE_STYLES.get(role.role, "")),
            ", ".join([str(role.ready), *others]),
            _bar(role.used_blocks, role.blocks),
            f"{role.running} + {role.waiting}",
            f"{role.requests_per_second:.3g}",
            f"{role.tokens_per_second:.3g}",
            _seconds(role.ttft_p90),
            _seconds(role.itl_p90),
        )
    return table


def _traffic(overview: Overview, rows: int) -> Table:
    """Draws pairs and open transfers side by side."""
    pairs = _table("prefill → decode", "fabric", numbers=("rate",))
    for pair in overview.pairs[:rows]:
        names = f"{pair.prefill} → {pair.decode}"
        pairs.add_row(names, pair.fabric, bytes_per_second(pair.bytes_per_second))
    if not overview.pairs:
        pairs.add_row(Text("nothing moves now", "dim"))
    transfers = _table("open transfer", "prefill → decode", numbers=("tokens", "age"))
    for each in overview.transfers[:rows]:
        tokens = "?" if each.prompt_tokens is None else str(each.prompt_tokens)
        names = f"{each.prefill} → {each.decode}"
        transfers.add_row(each.request_id, names, tokens, _seconds(each.age_seconds))
    if not overview.transfers:
        transfers.add_row(Text("none", "dim"))
    both = Table.grid(padding=(0, 4, 0, 0))
    both.add_row(pairs, transfers)
    return both


def _decisions(overview: Overview) -> list[RenderableType]:
    if overview.scaling is None:
        return []
    latest = [*overview.scaling.now, *overview.scaling.changes[:1]]
    return [Text(), *(_decision(step) for step in latest)]


def _decision(step: ScalingStep) -> Text:
    what = f"{step.current} → {step.wanted}" if step.direction != "hold" else f"{step.current}"
    return Text.assemble(
        ("scaling ", "bold"),
        (f"{step.role} {what}", _DIRECTION_STYLES[step.direction]),
        f"  {_seconds(step.age_seconds)} ago: {step.because}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _instances(overview: Overview, rows: int) -> Table:
    table = _table(
        "instance",
        "role",
        "state",
        "place",
        "KV blocks in use",
        numbers=("run + wait", "transfers", "sent", "received", "seen"),
    )
    shown = overview.instances[:rows]
    for each in shown:
        table.add_row(
            each.instance_id,
            Text(each.role, _ROLE_STYLES.get(each.role, "")),
            _state(each),
            "/".join(filter(None, (each.zone, each.rack, each.host))),
            "?" if each.used_blocks is None else _bar(each.used_blocks, each.blocks),
            f"{each.running} + {each.waiting}",
            str(each.transfers),
            bytes_per_second(each.sent_bytes_per_second),
            bytes_per_second(each.received_bytes_per_second),
            _seconds(each.heartbeat_seconds),
        )
    if not shown:
        table.add_row(Text("no instance matches" if overview.total else "none is registered"))
    elif len(shown) < overview.matching:
        table.add_row(Text(f"… {overview.matching - len(shown)} more", "dim"))
    return table


def _state(instance: InstanceSummary) -> Text:
    left = instance.drain_seconds
    words = instance.state if left is None else f"{instance.state} {left:.0f} s"
    return Text(words, _STATE_STYLES.get(instance.state, ""))


def _bar(used: int, blocks: int) -> Text:
    share = used / blocks if blocks else 0.0
    full = round(share * _BAR)
    style = "red" if share > 0.9 else "green"
    return Text.assemble(("█" * full, style), ("░" * (_BAR - full), "dim"), f" {share:4.0%}")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
