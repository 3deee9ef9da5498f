"""The result of a demo run: figures, a table, a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt, decoded after a transfer and in a single process. Times are in seconds."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    single_process_tokens: tuple[int, ...]
    fabric: str
    bytes: int
    pages: int
    writes: int
    transfer_seconds: float
    """The time in which at least one byte was under way."""
    prefill_seconds: float
    visible_transfer_seconds: float
    """The time from the end of prefill's computation until decode had the whole cache."""
    first_token_seconds: float
    """The time from the router's first call until decode had the first token."""

    @property
    def equal_tokens(self) -> int:
        """The number of places at which both runs have the same token."""
        pairs = zip(self.tokens, self.single_process_tokens, strict=False)
        return sum(ours == theirs for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All prompts of a demo run."""

    model: str
    runs: Sequence[PromptRun]

    @property
    def tokens(self) -> int:
        """The number of tokens that the single process computed."""
        return sum(len(run.single_process_tokens) for run in self.runs)

    @property
    def equal_tokens(self) -> int:
        return sum(run.equal_tokens for run in self.runs)

    @property
    def fabrics(self) -> tuple[str, ...]:
        return tuple(sorted({run.fabric for run in self.runs}))

    @property
    def gigabytes_per_second(self) -> float:
        """The rate over the time in which bytes were under way."""
        seconds = sum(run.transfer_seconds for run in self.runs)
        return sum(run.bytes for run in self.runs) / max(seconds, 1e-9) / 1e9

    @property
    def difference(self) -> str | None:
        """The first place at which the two runs differ; None if all tokens are equal."""
        for number, run in enumerate(self.runs, 1):
            if run.tokens == run.single_process_tokens:
                continue
            place = next(
                (
                    place
                    for place, pair in enumerate(
                        zip(run.tokens, run.single_process_tokens, strict=False), 1
                    )
                    if pair[0] != pair[1]
                ),
                min(len(run.tokens), len(run.single_process_tokens)) + 1,
            )
            return (
                f"{self.equal_tokens} of {self.tokens} tokens equal the single-process run; the "
                f"first difference is token {place} of prompt {number}"
            )
        return None

    def as_json(self) -> dict[str, Any]:
        """Returns every figure of the table, and those of each prompt."""
        return {
            "model": self.model,
            "prompts": len(self.runs),
            "tokens": self.tokens,
            "equal_tokens": self.equal_tokens,
            "difference": self.difference,
            "fabrics": self.fabrics,
            "bytes": sum(run.bytes for run in self.runs),
            "pages": sum(run.pages for run in self.runs),
            "writes": sum(run.writes for run in self.runs),
            "gigabytes_per_second": self.gigabytes_per_second,
            "seconds": {
                name: {"median": statistics.median(values), "max": max(values)}
                for name, values in self._times().items()
            },
            "runs": [asdict(run) for run in self.runs],
        }

    def table(self) -> Table:
        table = Table(title=f"kvxfer demo: {self.model}", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        style = "green" if self.difference is None else "bold red"
        table.add_row("prompts", str(len(self.runs)))
        table.add_row(
            "tokens equal to the single-process run",
            f"[{style}]{self.equal_tokens} of {self.tokens}[/]",
        )
        table.add_row("bytes moved", f"{sum(run.bytes for run in self.runs):,}")
        pages, writes = (sum(run.pages for run in self.runs), sum(run.writes for run in self.runs))
        table.add_row("pages", f"{pages:,} in {writes:,} writes")
        table.add_row("GB/s while moving", f"{self.gigabytes_per_second:.2f}")
        table.add_row("fabric", ", ".join(self.fabrics))
        labels = {
            "prefill": "time of prefill",
            "visible_transfer": "visible transfer, after the last layer",
            "first_token": "time to first token",
        }
        for name, values in self._times().items():
            table.add_row(
                labels[name],
                f"median {_seconds(statistics.median(values))}, max {_seconds(max(values))}",
            )
        return table

    def _times(self) -> dict[str, list[float]]:
        return {
            "prefill": [run.prefill_seconds for run in self.runs],
            "visible_transfer": [run.visible_transfer_seconds for run in self.runs],
            "first_token": [run.first_token_seconds for run in self.runs],
        }


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
