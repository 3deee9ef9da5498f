"""A file whose content may be replaced while the process runs: secrets, certificates."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import InvalidArgument, KvxferError

_log = logging.getLogger("kvxfer.watched_file")

_CHECK_SECONDS: Final = 1.0

T = TypeVar("T")
_Identity: TypeAlias = tuple[int, int, int, int]


class WatchedFile(Generic[T]):
    """The parsed content of a file, which is read again when the file changes. One thread.

    The file may be written in place, replaced by a rename, or reached through a link that is
    swapped, as Kubernetes does with a mounted secret. `current` checks it, at most once in
    `check_seconds`.

    The first read raises InvalidArgument, or what `parse` raises. If a later one fails, the last
    value stays and the log says so once.
    """

    def __init__(
        self,
        what: str,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        check_seconds: float = _CHECK_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path = path
        self._what = what
        self._parse = parse
        self._check_seconds = check_seconds
        self._clock = clock
        self._identity, self._value = self._read()
        self._next_check = clock.monotonic() + check_seconds

    @property
    def current(self) -> T:
        if self._clock.monotonic() >= self._next_check:
            self.refresh()
        return self._value

    def refresh(self) -> bool:
        """Checks the file now. Returns whether its content is a new value."""
        self._next_check = self._clock.monotonic() + self._check_seconds
        try:
            if self._identify() == self._identity:
                return False
            self._identity, self._value = self._read()
        except (OSError, KvxferError) as error:
            self._note_failure(error)
            return False
        _log.info("%s: read again from %s", self._what, self.path)
        return True

    def _read(self) -> tuple[_Identity, T]:
        try:
            # The identity first: a file that changes meanwhile is read once more.
            identity, content = self._identify(), self.path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"the {self._what} {self.path} cannot be read: {error.strerror}"
            ) from error
        return identity, self._parse(content)

    def _identify(self) -> _Identity:
        found = os.stat(self.path)  # noqa: PTH116 (on the path of every request)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _note_failure(self, error: Exception) -> None:
        try:
            self._identity = self._identify()
        except OSError:
            failed = (0, 0, 0, 0)
            if self._identity == failed:
                return
            self._identity = failed
        _log.error("%s: the last one read stays in force: %s", self._what, error)
