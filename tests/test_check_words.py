"""scripts/check-words: which texts it names, and which it lets pass."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "check-words"))


def named(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    file = folder / name
    file.write_text(text)
    return list(CHECK["problems"](file))


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a wave."""',
        'def f() -> int:\n    """What it takes."""',
        'async def f() -> int:\n    """Whether it serves, or how often."""',
        'class C:\n    """Those that wait."""',
        'class C:\n    a: int\n    """By name."""',
        'option = Option(help="Where it listens.")',
        "# Of one launch.\nx = 1",
        "x = 1  # its name",
        "# Redis is away.",
        '"""A step that\nlets it go."""',
        '"""A lease of its own."""',
    ],
)
def test_a_text_that_hides_its_subject_is_named(tmp_path: Path, text: str) -> None:
    assert named(tmp_path, "sample.py", text + "\n")


@pytest.mark.parametrize(
    "text",
    [
        '"""The bytes sent in a wave."""',
        'def f() -> int:\n    """Returns the bytes."""',
        'def f() -> bool:\n    """Whether it serves."""',
        'class C:\n    a: bool | None\n    """Whether it serves."""',
        "# The launch's arguments,\n# its name among them.\nx = 1",
        "# If a peer is lost, its blocks are free.",
        "# `of` is a name here.",
        'text = "of a wave; Redis is away"',
    ],
)
def test_a_plain_text_passes(tmp_path: Path, text: str) -> None:
    assert named(tmp_path, "sample.py", text + "\n") == []


@pytest.mark.parametrize(
    "name", ["sample.cpp", "sample.hpp", "sample.lua", "sample.md", "sample.yaml"]
)
def test_other_languages_have_comments_and_phrases(tmp_path: Path, name: str) -> None:
    mark = {".lua": "-- ", ".md": "", ".yaml": ""}.get(Path(name).suffix, "// ")
    assert named(tmp_path, name, f"{mark}Redis is away.\n")
    assert named(tmp_path, name, f"{mark}Redis is unavailable.\n") == []
    if mark:
        assert named(tmp_path, name, f"{mark}Of one launch.\n")
        assert named(tmp_path, name, f"f();  {mark}its name\n")
