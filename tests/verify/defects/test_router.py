"""The defects of `make test SUITE=router-defects` apply to the current sources, and a defect that
no test catches is reported."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from verify.defects.router.__main__ import ROOT, Defect, defects, main

pytestmark = pytest.mark.native

FILE = "kvxfer/event_stream.py"
LINE = "MAX_EVENT_BYTES: Final = 64 << 20\n"
SUITE = """\
from kvxfer.event_stream import MAX_EVENT_BYTES


def test_an_event_has_room() -> None:
    assert MAX_EVENT_BYTES > 9
"""


def test_there_are_many_defects() -> None:
    assert len(defects()) >= 20


@pytest.mark.parametrize("defect", defects(), ids=lambda defect: defect.patch.stem)
def test_a_defect_applies_and_names_an_existing_suite(defect: Defect) -> None:
    assert defect.apply(ROOT, "--check")
    assert (ROOT / defect.suite).is_file()
    assert defect.about


def planted(folder: Path, *, there: str = LINE, instead: str) -> Defect:
    """Plants a defect whose patch replaces a line, and whose suite wants more than nine bytes."""
    before = (ROOT / FILE).read_text().replace(LINE, there).splitlines(keepends=True)
    after = [instead if line == there else line for line in before]
    diff = difflib.unified_diff(before, after, f"a/{FILE}", f"b/{FILE}")
    suite = folder / "test_planted.py"
    suite.write_text(SUITE)
    patch = folder / "planted.patch"
    patch.write_text(f"An event has no room.\n\nSuite: {suite}\n\n{''.join(diff)}")
    return Defect(patch)


def test_a_patch_applies_only_to_the_text_that_it_was_made_from(tmp_path: Path) -> None:
    assert planted(tmp_path, instead="MAX_EVENT_BYTES: Final = 9\n").apply(ROOT, "--check")
    other = planted(tmp_path, there="MAX_EVENT_BYTES: Final = 1 << 20\n", instead="\n")
    assert not other.apply(ROOT, "--check")


def test_a_patch_that_names_no_tests_is_refused(tmp_path: Path) -> None:
    patch = tmp_path / "nameless.patch"
    patch.write_text("An event has no room.\n\nSuites: several\n")
    with pytest.raises(SystemExit, match=r"nameless\.patch"):
        print(Defect(patch).suite)


@pytest.mark.parametrize(
    ("there", "instead", "status", "told"),
    [
        (LINE, "MAX_EVENT_BYTES: Final = 9\n", 0, "test_an_event_has_room"),
        (LINE, "MAX_EVENT_BYTES: Final = 10\n", 1, "NOTHING"),
        ("MAX_EVENT_BYTES: Final = 1 << 20\n", "\n", 1, "planted.patch does not apply"),
    ],
    ids=["caught", "not caught", "no longer applies"],
)
def test_only_a_defect_that_is_caught_is_green(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    there: str,
    instead: str,
    status: int,
    told: str,
) -> None:
    planted(tmp_path, there=there, instead=instead)
    assert main(tmp_path, tmp_path / "work") == status
    shown = capsys.readouterr().out
    assert told in shown
    assert ("proved: 1 of 1" in shown) == (not status)
