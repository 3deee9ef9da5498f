"""docs/runbooks.md as written: its commands print the output that it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.docs.console import Shell, sessions

pytestmark = pytest.mark.realtime

RUNBOOKS: Final = sessions((Path(__file__).parents[2] / "docs/runbooks.md").read_text())
INSTALL: Final = "Install"


class Installation:
    """A shell in which the first runbook was run. The others leave its fleet as they found it, so
    all use this shell until one fails."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._folder = Path()
        self._shell: Shell | None = None

    @contextmanager
    def installed(self) -> Iterator[Shell]:
        try:
            if self._shell is None:
                self._folder = self._folders.mktemp("fleet")
                self._shell = Shell(self._folder)
                for step in RUNBOOKS[INSTALL]:
                    self._shell.take(step)
            yield self._shell
        except BaseException:
            self.close()
            for log in sorted(self._folder.glob("*.log")):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-1000:]}")
            raise

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    fleet = Installation(tmp_path_factory)
    yield fleet
    fleet.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("title", RUNBOOKS)
def test_a_runbook_does_what_it_says(title: str, fleet: Installation) -> None:
    with fleet.installed() as shell:
        if title != INSTALL:
            for step in RUNBOOKS[title]:
                shell.take(step)
