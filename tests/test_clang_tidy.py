"""scripts/clang-tidy finds again what has passed before, and nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "clang-tidy"
loader = importlib.machinery.SourceFileLoader("clang_tidy", str(SCRIPT))
spec = importlib.util.spec_from_loader(loader.name, loader)
assert spec is not None
sys.modules[spec.name] = clang_tidy = importlib.util.module_from_spec(spec)
loader.exec_module(clang_tidy)

pytestmark = pytest.mark.native


def key(root: Path, monkeypatch: pytest.MonkeyPatch, *, header: str = "", options: str = "") -> str:
    """Returns the key of a file with a header, in a clone at `root`."""
    root.mkdir(exist_ok=True)
    (root / ".clang-tidy").write_text("Checks: bugprone-*\n")
    (root / "page.hpp").write_text(f"int pages();\n{header}\n")
    system = root.parent / "m-system"  # sorts between the names of the test's clones
    system.mkdir(exist_ok=True)
    (system / "size.hpp").touch()
    source = '#include "page.hpp"\n#include "../m-system/size.hpp"\nint pages() { return 1; }\n'
    (root / "page.cpp").write_text(source)
    monkeypatch.setattr(clang_tidy, "ROOT", root)
    monkeypatch.setattr(clang_tidy, "_version", lambda: "one")
    clang_tidy._digest.cache_clear()
    command = ("c++", *options.split(), "-o", "page.o", "-c", str(root / "page.cpp"))
    return clang_tidy.Source(root / "page.cpp", root, command).key()


def test_clones_at_different_paths_share_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key(tmp_path / "a-clone", monkeypatch) == key(tmp_path / "z-clone", monkeypatch)


@pytest.mark.parametrize(
    "change",
    [{"header": "// NOLINT"}, {"header": "#if 0\nint unused();\n#endif"}, {"options": "-DNDEBUG"}],
    ids=["comment", "inactive", "option"],
)
def test_a_change_that_clang_tidy_sees_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    assert key(tmp_path, monkeypatch) != key(tmp_path, monkeypatch, **change)
