"""`kvxfer weights`: what an update of a model's weights would send, and the known updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvxfer.cli.options import with_options
from kvxfer.cli.weight_updates import updates
from kvxfer.weights.plan.settings import ScheduleSettings

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.weights.maps import WeightMap
    from kvxfer.weights.plan.figures import Figures, Spread
    from kvxfer.weights.plan.schedule import Schedule

_STAGES: Final = 4
_NAMES_SHOWN: Final = 3


def register(app: typer.Typer) -> None:
    weights = typer.Typer(
        help="Updates of a model's weights, from training to inference ranks.",
        no_args_is_help=True,
    )
    weights.command("plan")(plan)
    weights.command("updates")(updates)
    app.add_typer(weights, name="weights")


@with_options
def plan(
    *,
    model: Annotated[str | None, typer.Option(help="A known model: kimi-k2 or llama-3-8b.")] = None,
    train: Annotated[int | None, typer.Option(min=1, help="Number of training ranks.")] = None,
    infer: Annotated[int | None, typer.Option(min=1, help="Number of inference ranks.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="MAP.json", help="Map of another model (docs/weight-maps.md)."),
    ] = None,
    settings: ScheduleSettings,
    gbps: Annotated[float, typer.Option(help="Rate of each NIC, in 10^9 bit/s.")] = 400.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Plan which rank writes which slices of parameters to which rank, and show the totals.

    Nothing is sent.
    """
    from math import isfinite

    from kvxfer.cli.output import out, show_json
    from kvxfer.clock import SYSTEM_CLOCK
    from kvxfer.errors import InvalidArgument
    from kvxfer.weights.plan.schedule import plan_weights

    if not (isfinite(gbps) and gbps > 0):
        raise InvalidArgument(f"--gbps is {gbps}; use more than 0")
    name, weights = _map(model, train, infer, file)
    begun = SYSTEM_CLOCK.monotonic()
    with _progress_bar() as stage:
        schedule = plan_weights(weights, settings, stage)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        show_json(_document(name, schedule, seconds, gbps))
        return
    for part in _report(name, schedule, seconds, gbps):
        out.print(part, highlight=False)


def _map(
    model: str | None, train: int | None, infer: int | None, file: Path | None
) -> tuple[str, WeightMap]:
    """Returns the map, and its name."""
    from kvxfer.errors import InvalidArgument
    from kvxfer.weights.document import read_map
    from kvxfer.weights.models import MODELS, model_map

    if file is not None:
        if model is not None or train is not None or infer is not None:
            raise InvalidArgument("--file says the model and the ranks; leave the options out")
        return file.name, read_map(file)
    if model is None:
        raise InvalidArgument(f"no model is given; pass --model {' or '.join(MODELS)}, or --file")
    if train is None or infer is None:
        raise InvalidArgument("a known model needs the number of ranks; pass --train and --infer")
    return model, model_map(model, train, infer)


def _peak_bytes() -> int:
    """Returns the most memory that this process has had so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _document(name: str, schedule: Schedule, seconds: float, gbps: float) -> dict[str, Any]:
    import msgspec

    figures, weights = schedule.figures, schedule.weights
    document: dict[str, Any] = msgspec.to_builtins(figures)
    for member in ("senders", "receivers", "sender_nics", "receiver_nics"):
        document[member]["balance"] = getattr(figures, member).balance
    return {
        "model": name,
        "train_ranks": weights.train.ranks,
        "infer_ranks": weights.infer.ranks,
        "plan_seconds": seconds,
        "peak_memory_bytes": _peak_bytes(),
        **document,
        "gbps": gbps,
        "wire_seconds": figures.seconds(gbps),
    }


def _report(name: str, schedule: Schedule, seconds: float, gbps: float) -> Iterator[str | Table]:
    from kvxfer.cli.output import err

    figures, weights = schedule.figures, schedule.weights
    yield (
        f"{name}: {figures.parameters:,} parameters from {weights.train.ranks} training ranks to "
        f"{weights.infer.ranks} inference ranks"
    )
    yield f"planned in {seconds:.2f} s, with {_size(_peak_bytes())} of memory at most"
    yield (
        f"{_size(figures.nbytes)} in {figures.writes:,} writes and {figures.bursts} bursts; "
        f"{figures.gathered:,} writes gather small pieces, the largest has "
        f"{_size(figures.largest_write)}"
    )
    if figures.padding_bytes:
        yield f"{_size(figures.padding_bytes)} of inference are padding, and not sent"
    if unwanted := schedule.demands.unwanted:
        shown = ", ".join(unwanted[:_NAMES_SHOWN]) + (", …" if len(unwanted) > _NAMES_SHOWN else "")
        err.print(
            f"[yellow]not sent[/] {len(unwanted):,} parameters that no inference rank wants: "
            f"{shown}",
            highlight=False,
        )
    yield _table(figures)
    yield f"{figures.seconds(gbps):.3f} s on the wire, at {gbps:g} Gbit/s for each NIC"


def _table(figures: Figures) -> Table:
    from rich.table import Table

    table = Table(box=None)
    table.add_column("bytes of each", no_wrap=True)
    for header in ("least", "mean", "most", "most / mean"):
        table.add_column(header, justify="right", no_wrap=True)
    rows: tuple[tuple[str, Spread], ...] = (
        ("sender", figures.senders),
        ("receiver", figures.receivers),
        ("sender NIC", figures.sender_nics),
        ("receiver NIC", figures.receiver_nics),
    )
    for label, spread in rows:
        sizes = map(_size, (spread.least, spread.mean, spread.most))
        table.add_row(label, *sizes, f"{spread.balance:.3f}")
    return table


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


@contextmanager
def _progress_bar() -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr if that is a terminal; it is drawn when a stage begins."""
    from rich.progress import Progress

    from kvxfer.cli.output import err

    with Progress(
        console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task("", total=_STAGES, completed=-1)

        def stage(name: str) -> None:
            bar.update(task, description=name, advance=1, refresh=True)

        yield stage
