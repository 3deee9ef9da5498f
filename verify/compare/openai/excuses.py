"""The differences between a router over a pair and one aggregated server, from docs/router.md."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvxfer.web.request_log import is_request_id
from verify.compare.openai.answers import Where
from verify.compare.openai.cases import MODELS, Case

DOCUMENT: Final = Path(__file__).parents[3] / "docs/router.md"
_HEAD: Final = ["route", "member", "condition", "part", "aggregated server", "router"]
_ALL: Final = "all"

_CONDITIONS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "not null": lambda value: value is not None,
    "of no worker": lambda value: isinstance(value, str) and value not in MODELS,
    "not fit for a log": lambda value: isinstance(value, str) and not is_request_id(value),
    "over 1": lambda value: isinstance(value, int | float) and value > 1,
}


@dataclass(frozen=True, slots=True)
class Excuse:
    """A row of the table: if a member has such a value, a part of the answer is the router's."""

    route: str
    member: str
    condition: str
    part: str

    def matches(self, route: str, body: Any) -> bool:
        """Returns whether the row is about such a request."""
        if self.route not in (_ALL, route) or not isinstance(body, dict):
            return False
        return self.member in body and _CONDITIONS[self.condition](body[self.member])

    def refuses(self, route: str, body: Any) -> bool:
        """Returns whether no part of the answer to such a request is the engine's."""
        return self.part == _ALL and self.matches(route, body)

    def covers(self, where: Sequence[Where]) -> bool:
        """Returns whether the row is about all places at which the answers differ."""
        return self.part == _ALL or all(self.part in each.path for each in where)


def read_excuses(document: Path = DOCUMENT) -> list[Excuse]:
    """Returns the rows of the table. Raises ValueError for a row that it cannot read."""
    lines = [_cells(line) for line in document.read_text().splitlines()]
    if _HEAD not in lines:
        raise ValueError(f"{document.name} has no table of {', '.join(_HEAD)}")
    found = []
    for row in itertools.takewhile(any, lines[lines.index(_HEAD) + 2 :]):
        if len(row) != len(_HEAD):
            raise ValueError(
                f"{document.name}: a row does not have {len(_HEAD)} cells: {' | '.join(row)}"
            )
        route, member, condition, part, *_ = (cell.strip("`") for cell in row)
        if condition not in _CONDITIONS:
            raise ValueError(
                f"{document.name}: the condition {condition!r} is none of {', '.join(_CONDITIONS)}"
            )
        found.append(Excuse(route, member, condition, part))
    return found


def excusing(
    excuses: Sequence[Excuse], case: Case, body: Any, where: Sequence[Where]
) -> Excuse | None:
    """Returns the first row that excuses the differences of an answer."""
    about = (each for each in excuses if each.matches(case.route, body))
    return next((each for each in about if each.covers(where)), None)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
