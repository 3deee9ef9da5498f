"""Public request traces: Azure's CSV and Mooncake's JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.prefix_hashes import MAX_HASHES_PER_REQUEST
from kvxfer.scheduler.simulator.workload import Arrivals, RecordedRequests

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_MEMBERS: Final = ("timestamp", "input_length", "output_length")
# Tokens that one of Mooncake's hash_ids stands for.
_TOKENS_PER_HASH: Final = 512
_MOST_TOKENS: Final = 10_000_000
_REMEDY: Final = (
    f"give a CSV of Azure's LLM inference traces ({','.join(AZURE_COLUMNS)}) or JSON lines as of "
    f"Mooncake ({', '.join(MOONCAKE_MEMBERS)}, hash_ids)"
)

# Seconds, prompt, output, hashes.
_Row: TypeAlias = tuple[float, int, int, tuple[int, ...]]


def read_requests(path: Path) -> RecordedRequests:
    """Reads the requests of a file. The first is at 0 s, whatever the order of the lines.

    Raises InvalidArgument that names the line and the remedy if the file is no trace.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            recorded = first.lstrip().startswith("{")
            rows = _mooncake(str(path), lines) if recorded else _azure(str(path), lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the trace {path} cannot be read ({error}); {_REMEDY}") from error
    if not rows:
        raise InvalidArgument(f"{path} has no request; {_REMEDY}")
    rows.sort(key=lambda row: row[0])
    begin = rows[0][0]
    hashed = any(row[3] for row in rows)
    arrivals = Arrivals(
        np.array([row[0] - begin for row in rows]),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.int64),
        tuple(row[3] for row in rows) if hashed else None,
    )
    per_hash = _TOKENS_PER_HASH if hashed else None
    return RecordedRequests(path.name, arrivals, tokens_per_hash=per_hash)


def _azure(name: str, lines: Iterable[str]) -> list[_Row]:
    table = csv.reader(lines)
    header = tuple(column.strip() for column in next(table, []))
    if header != AZURE_COLUMNS:
        raise InvalidArgument(f"{name}, line 1: the columns are {','.join(header)!r}; {_REMEDY}")
    rows: list[_Row] = []
    for row in table:
        if not row:
            continue
        where = f"{name}, line {table.line_num}"
        if len(row) != len(AZURE_COLUMNS):
            raise InvalidArgument(f"{where}: {len(row)} values; write {len(AZURE_COLUMNS)}")
        try:
            moment = datetime.fromisoformat(row[0].strip())
        except ValueError:
            raise InvalidArgument(
                f"{where}: TIMESTAMP is {row[0]!r}; write it as 2023-11-16 18:15:46.680590"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        prompt, output = (
            _tokens(where, column, text.strip())
            for column, text in zip(AZURE_COLUMNS[1:], row[1:], strict=True)
        )
        rows.append((moment.timestamp(), prompt, output, ()))
    return rows


def _mooncake(name: str, lines: Iterable[str]) -> list[_Row]:
    rows: list[_Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            request = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidArgument(f"{where}: no JSON ({error}); {_REMEDY}") from error
        missing = [m for m in MOONCAKE_MEMBERS if not isinstance(request, dict) or m not in request]
        if missing:
            raise InvalidArgument(f"{where}: {missing[0]} is missing; {_REMEDY}")
        at = request["timestamp"]
        if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e15:
            raise InvalidArgument(f"{where}: timestamp is {at!r}; write milliseconds, 0 or more")
        rows.append(
            (
                at / 1000,
                _tokens(where, "input_length", request["input_length"]),
                _tokens(where, "output_length", request["output_length"]),
                _hashes(where, request.get("hash_ids", [])),
            )
        )
    return rows


def _tokens(where: str, what: str, value: Any) -> int:
    """Returns a number of tokens; an empty prompt or answer counts as one token."""
    try:
        count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if not 0 <= count <= _MOST_TOKENS:
        raise InvalidArgument(f"{where}: {what} is {value!r}; write 0 to {_MOST_TOKENS} tokens")
    return max(count, 1)


def _hashes(where: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 64
        for number in value
    ):
        raise InvalidArgument(
            f"{where}: hash_ids is {str(value)[:60]!r}; write a list of numbers, 0 or more"
        )
    return tuple(value[:MAX_HASHES_PER_REQUEST])
