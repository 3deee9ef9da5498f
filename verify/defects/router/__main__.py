"""Applies the patches of this folder, one at a time, to a copy of the sources below
build/router-defects, and checks that the test file that a patch names catches it.

Exit code 1 if a patch is not caught or no longer applies. `make test SUITE=router-defects`
calls it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[3]
HERE: Final = Path(__file__).parent
WORK: Final = ROOT / "build/router-defects"

_SUITE: Final = re.compile(r"^Suite: (\S+)$", re.MULTILINE)
_FAILED: Final = re.compile(r"^FAILED \S+::([^\s\[]+)", re.MULTILINE)
_SECONDS: Final = 300
# The editable installation finds the sources of the checkout before any other.
_RUN: Final = """
import sys
sys.meta_path = [each for each in sys.meta_path if "ScikitBuild" not in type(each).__name__]
sys.path.insert(0, "")
import kvxfer.router, pytest
assert kvxfer.router.__file__.startswith(sys.argv[1]), kvxfer.router.__file__
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Defect:
    """A patch. It names what it breaks, and the tests that have to fail with it."""

    patch: Path

    @property
    def about(self) -> str:
        return self.patch.read_text().partition("\n")[0]

    @property
    def suite(self) -> str:
        found = _SUITE.search(self.patch.read_text())
        if found is None:
            raise SystemExit(f"{self.patch.name}: no line says `Suite: TESTS`")
        return found[1]

    def apply(self, tree: Path, *options: str) -> bool:
        """Applies the patch to a tree of the sources; with `--reverse`, removes it. Returns whether
        it fits."""
        # Keeps git from taking the copy for a part of the repository around it.
        environment = {"GIT_CEILING_DIRECTORIES": str(tree.parent), "PATH": "/usr/bin:/bin"}
        command = ["git", "apply", "--whitespace=nowarn", *options, str(self.patch)]
        return not subprocess.run(command, cwd=tree, env=environment, check=False).returncode


def defects(folder: Path = HERE) -> list[Defect]:
    return [Defect(patch) for patch in sorted(folder.glob("*.patch"))]


def copy_sources(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("kvxfer", "api", "scheduler", "tests", "verify", "docs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    for library in _native_libraries():
        (tree / "kvxfer" / library.name).symlink_to(library)


def _native_libraries() -> Iterator[Path]:
    """Yields the engine's libraries, which the installation keeps beside the sources."""
    engine = find_spec("kvxfer._native")
    if engine is None or engine.origin is None:
        raise SystemExit("kvxfer is not installed: scripts/setup test")
    yield from Path(engine.origin).parent.glob("*.so*")


def tests(tree: Path, suite: str) -> tuple[int, str]:
    """Runs a test file in a copy. Returns the exit code and the output."""
    command = [sys.executable, "-c", _RUN, str(tree), suite]
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {suite}::(it does not end)"
    return done.returncode, done.stdout + done.stderr


def main(folder: Path = HERE, tree: Path = WORK) -> int:
    console = Console()
    found = defects(folder)
    copy_sources(tree)
    for suite in sorted({defect.suite for defect in found}):
        code, output = tests(tree, suite)
        if code:
            console.print(output[-2000:], markup=False, highlight=False)
            console.print(f"{suite} fails without any defect", style="red")
            return 1
    table = Table("defect", "what it breaks", "caught by")
    caught = 0
    for defect in found:
        with console.status(f"{defect.patch.stem}: {defect.about}"):
            if defect.apply(tree):
                code, output = tests(tree, defect.suite)
                defect.apply(tree, "--reverse")
                failed = _FAILED.search(output)
                by = failed[1] if code == 1 and failed else ""
            else:
                by = ""
                console.print(f"{defect.patch.name} does not apply", style="red")
        caught += bool(by)
        table.add_row(defect.patch.stem, defect.about, by or "NOTHING", style=None if by else "red")
    console.print(table)
    if caught < len(found):
        return 1
    console.print(f"proved: {caught} of {len(found)} defects of the router are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
