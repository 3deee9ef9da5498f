"""The course of a simulated day as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.scheduler.simulator.tally import Point, Results

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises NotBuilt without matplotlib, InvalidArgument if the file cannot be written. Call it
    before the simulation."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise NotBuilt("--plot needs matplotlib: pip install 'kvxfer[plot]'") from error
    if path.suffix not in _FORMATS:
        raise InvalidArgument(f"--plot {path}: write a name that ends in {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--plot {path}: {path.parent} is not a directory")


def plot_course(results: Sequence[Results], path: Path) -> None:
    """Draws a panel per figure, with a line per policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, Callable[[Point], float | None]]] = [
        ("requests/s", lambda p: p.requests_per_second),
        ("prefill workers", lambda p: p.prefill_workers),
        ("decode workers", lambda p: p.decode_workers),
        ("TTFT p90, s", lambda p: p.ttft_p90),
        ("ITL p90, ms", lambda p: None if p.itl_p90 is None else p.itl_p90 * 1000),
        ("within targets, %", lambda p: None if p.goodput is None else p.goodput * 100),
    ]
    figure = Figure(figsize=(9, 1.7 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    first = None
    for number, (title, of) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, number + 1, sharex=first)
        first = first or axes
        for result in results:
            known = [(p.at / 3600, of(p)) for p in result.course if of(p) is not None]
            axes.plot(*zip(*known, strict=True), label=result.policy) if known else None
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if first is not None:
        first.legend(fontsize=8)
        axes.set_xlabel("hours")
    figure.savefig(path, dpi=120)
