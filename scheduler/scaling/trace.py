"""Load traces: CSV files that say how the load on a fleet changes over time."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidArgument

COLUMNS: Final = ("seconds", "requests_per_second", "prompt_tokens", "output_tokens")
BUNDLED: Final = ("step", "day", "burst")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a fleet: requests per second and their mean lengths in tokens."""

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Loads over time. Each holds from its second to the next one's; the last second is the end."""

    name: str
    seconds: tuple[float, ...]
    loads: tuple[Load, ...]

    @property
    def end(self) -> float:
        return self.seconds[-1]

    def at(self, second: float) -> Load:
        return self.loads[max(bisect_right(self.seconds, second) - 1, 0)]


def read_trace(name: str) -> Trace:
    """Reads the trace of a file, or a bundled one: `step`, `day` or `burst`.

    Raises InvalidArgument that names the wrong line of a file.
    """
    if name in BUNDLED:
        bundled = resources.files("kvxfer.scheduler.scaling") / "traces" / f"{name}.csv"
        text = bundled.read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"the load trace {name} cannot be read ({error}); name a CSV file, or one of the "
                f"bundled traces {', '.join(BUNDLED)}"
            ) from error
    return parse_trace(name, text.splitlines())


def parse_trace(name: str, lines: Sequence[str]) -> Trace:
    rows = csv.reader(lines)
    header = next(rows, [])
    if tuple(column.strip() for column in header) != COLUMNS:
        raise InvalidArgument(
            f"{name}, line 1: the columns are {','.join(header)!r}; write {','.join(COLUMNS)}"
        )
    seconds: list[float] = []
    loads: list[Load] = []
    for row in rows:
        where = f"{name}, line {rows.line_num}"
        if not row:
            continue
        second, rate, prompt, output = _numbers(where, row)
        if not seconds and second != 0:
            raise InvalidArgument(f"{where}: the first row begins at {second:g} s; begin at 0")
        if seconds and second <= seconds[-1]:
            raise InvalidArgument(
                f"{where}: {second:g} s does not come after {seconds[-1]:g} s; sort the rows"
            )
        if prompt < 1 or output < 1:
            raise InvalidArgument(f"{where}: a request has at least 1 prompt and 1 output token")
        seconds.append(second)
        loads.append(Load(rate, prompt, output))
    if len(seconds) < 2:
        raise InvalidArgument(f"{name} has {len(seconds)} rows; write at least two, 0 and the end")
    return Trace(name, tuple(seconds), tuple(loads))


def _numbers(where: str, row: Sequence[str]) -> tuple[float, ...]:
    if len(row) != len(COLUMNS):
        raise InvalidArgument(f"{where}: {len(row)} values; write {len(COLUMNS)}")
    numbers = []
    for column, text in zip(COLUMNS, row, strict=True):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise InvalidArgument(f"{where}: {column} is {text!r}; write a number, 0 or more")
        numbers.append(number)
    return tuple(numbers)
