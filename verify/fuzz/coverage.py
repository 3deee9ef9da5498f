"""The lines of the decoders, and the share of them that was reached."""

from __future__ import annotations

from collections.abc import Mapping


class Coverage:
    def __init__(self) -> None:
        self.missed: dict[str, list[int]] = {}
        """The lines that were not reached, by file."""
        self._reached = 0
        self._lines = 0

    def add(self, file: str, lines: Mapping[int, bool]) -> None:
        """Adds the lines of a file, each with whether it was reached. Raises LookupError if there
        are none."""
        if not lines:
            raise LookupError(f"{file} has none of the functions that its target must cover")
        self._lines += len(lines)
        self._reached += sum(lines.values())
        if missed := sorted(line for line, reached in lines.items() if not reached):
            self.missed[file] = missed

    @property
    def percent(self) -> float:
        return 100 * self._reached / self._lines
