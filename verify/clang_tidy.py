"""Runs clang-tidy on files of a build, several at a time. Skips files that have passed before.

    python -m verify.clang_tidy BUILD CACHE FILE...

BUILD has compile_commands.json. CACHE gets an empty file for each file that passed. Its name is a
hash of clang-tidy's whole input: the file and all its headers (comments included), the compile
command, .clang-tidy, and the version of clang-tidy.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
CLANG_TIDY: Final = Path(sys.prefix) / "bin" / "clang-tidy"


@functools.cache
def _version() -> str:
    return subprocess.run(
        [CLANG_TIDY, "--version"], capture_output=True, text=True, check=True
    ).stdout


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Source:
    """A file and its entry in compile_commands.json."""

    path: Path
    folder: Path
    command: tuple[str, ...]

    def included(self) -> set[Path]:
        """Returns the file and its headers, those of the system too."""
        compiler, *options = self.command
        del options[options.index("-o") : options.index("-o") + 2]
        rule = subprocess.run(
            [compiler, *options, "-M"], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout
        names = re.split(r"(?<!\\)\s+", rule.partition(":")[2].replace("\\\n", " "))
        return {(self.folder / name).resolve() for name in names if name}

    def key(self) -> str:
        """Returns the name in CACHE. It is the same in a clone at another path."""
        looked_at = [_version(), _digest(ROOT / ".clang-tidy"), *self.command]
        # The order must not depend on the clone's path.
        included = ((str(path).replace(str(ROOT), ""), path) for path in self.included())
        for name, path in sorted(included):
            looked_at += [name, _digest(path)]
        text = "\0".join(looked_at).replace(str(ROOT), "")
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def sources(build: Path) -> dict[Path, Source]:
    entries = json.loads((build / "compile_commands.json").read_text())
    found = {}
    for entry in entries:
        path = Path(entry["file"]).resolve()
        found[path] = Source(path, Path(entry["directory"]), tuple(shlex.split(entry["command"])))
    return found


def check(source: Source, build: Path, cache: Path) -> bool | None:
    """Returns whether it passed now; None if it had passed before."""
    stamp = cache / source.key()
    if stamp.exists():
        stamp.touch()
        return None
    command = [CLANG_TIDY, "--quiet", "--extra-arg=-Wno-unknown-warning-option", "-p", build]
    done = subprocess.run(
        [*command, source.path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
        return False
    stamp.touch()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    known = sources(arguments.build)
    wanted = [known[path.resolve()] for path in arguments.files]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(
            pool.map(lambda source: check(source, arguments.build, arguments.cache), wanted)
        )
    print(f"clang-tidy: {len(wanted)} files, {results.count(None)} of them passed before")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
