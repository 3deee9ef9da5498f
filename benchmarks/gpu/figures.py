"""The measurements, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt: times in seconds, and the output `tokens`."""

    first_token: float
    prefill: float
    """The time until prefill had the first token."""
    nbytes: int
    tokens: tuple[int, ...]

    @property
    def visible_transfer(self) -> float:
        """The part of the transfer after prefill's computation."""
        return max(self.first_token - self.prefill, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """Prompts of one length: in two processes over one fabric, and in one process."""

    fabric: str
    length: int
    apart: tuple[Run, ...]
    one_process: tuple[Run, ...]

    @property
    def first_token(self) -> float:
        return median(run.first_token for run in self.apart)

    @property
    def first_token_of_one_process(self) -> float:
        return median(run.first_token for run in self.one_process)

    @property
    def ratio(self) -> float:
        return self.first_token / self.first_token_of_one_process

    @property
    def visible_transfer(self) -> float:
        return median(run.visible_transfer for run in self.apart)

    @property
    def gigabytes(self) -> float:
        """The bytes that move per prompt."""
        return self.apart[0].nbytes / 1e9

    @property
    def tokens_equal(self) -> bool:
        """Whether every run gave the same tokens."""
        return len({run.tokens for run in (*self.apart, *self.one_process)}) == 1


def as_json(device: str, rows: Sequence[Row]) -> dict[str, object]:
    """Returns every figure with every sample."""
    return {
        "device": device,
        "rows": [
            asdict(row)
            | {
                "first_token": row.first_token,
                "first_token_of_one_process": row.first_token_of_one_process,
                "ratio": row.ratio,
                "visible_transfer": row.visible_transfer,
                "gigabytes": row.gigabytes,
                "tokens_equal": row.tokens_equal,
            }
            for row in rows
        ],
    }


def table(device: str, rows: Sequence[Row]) -> list[str]:
    """Returns lines of text."""
    names = ("fabric", "prompt", "first token", "one process", "ratio", "visible", "GB moved")
    lines = [
        f"{device}: the reference engine, prefill and decode apart beside one process, medians",
        "",
        "{:8} {:>7} {:>12} {:>12} {:>6} {:>9} {:>9}  tokens".format(*names),
    ]
    lines += [
        f"{row.fabric:8} {row.length:7} {1e3 * row.first_token:9.2f} ms "
        f"{1e3 * row.first_token_of_one_process:9.2f} ms {row.ratio:6.2f} "
        f"{1e3 * row.visible_transfer:6.2f} ms {row.gigabytes:9.3f}  "
        f"{'equal' if row.tokens_equal else 'DIFFER'}"
        for row in rows
    ]
    return lines
