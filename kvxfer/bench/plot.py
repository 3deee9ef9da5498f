"""Throughput over page size as a picture."""

from __future__ import annotations

from pathlib import Path

from kvxfer.bench.cases import LIMIT_TITLES
from kvxfer.bench.figures import Report
from kvxfer.errors import InvalidArgument, NotBuilt


def check_plot_path(path: Path) -> None:
    """Raises NotBuilt without matplotlib, InvalidArgument if the file cannot be written. Call it
    before a run, so that minutes of measuring are not lost."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise NotBuilt("--plot needs matplotlib: pip install 'kvxfer[plot]'") from error
    if not path.parent.is_dir():
        raise InvalidArgument(f"--plot {path}: {path.parent} is not a directory")


def plot_report(report: Report, path: Path) -> None:
    """Writes one panel per measured case, engine and limit over page size; the format follows the
    file's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [figures for figures in report.cases if figures.throughput]
    figure = Figure(figsize=(4.2 * max(1, len(cases)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for index, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), index + 1)
        sizes = [f"{each.page_bytes >> 10}" for each in case.throughput]
        axes.plot(sizes, [each.gb_per_s for each in case.throughput], "o-", label="kvxfer")
        axes.plot(
            sizes,
            [each.limit_gb_per_s for each in case.throughput],
            "s--",
            color="gray",
            label=LIMIT_TITLES[case.limit],
        )
        for each, size in zip(case.throughput, sizes, strict=True):
            axes.annotate(
                f"{each.ratio:.2f}",
                (size, each.gb_per_s),
                xytext=(0, 7 if each.ratio >= 1 else -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set(title=case.name, xlabel="page, KiB", ylabel="GB/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    machine = report.machine
    figure.suptitle(
        f"{report.request_bytes >> 20} MiB per request, {machine.cores} cores, {machine.cpu}, "
        f"{report.started_at[:10]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
