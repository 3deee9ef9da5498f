"""The Dockerfiles: they copy all that is needed, start programs that exist, and run without root.

The images are not built here: that takes a Docker daemon.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT

FOLDER = ROOT / "deploy" / "docker"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".dockerignore")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    lines = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, _, rest in lines]


def stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in instructions(path):
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "final"
            current = found.setdefault(name, [])
        current.append((word, rest))
    return found


def packages(stage: list[tuple[str, str]]) -> set[str]:
    text = " ".join(rest for word, rest in stage if word == "RUN")
    asked = re.search(r"--no-install-recommends ([a-z0-9+ -]+?) &&", text)
    return set(asked[1].split()) if asked else set()


def test_there_are_two_dockerfiles() -> None:
    assert [path.name for path in FILES] == ["Dockerfile", "vllm.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_copied_files_exist_and_are_all_that_a_wheel_needs(path: Path) -> None:
    copied = {
        name for word, rest in stages(path)["build"] if word == "COPY" for name in rest.split()[:-1]
    }
    assert [name for name in copied if not (ROOT / name).exists()] == []
    packages = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    linked = (part for name in packages for part in (ROOT / name).iterdir() if part.is_symlink())
    needed = {*packages, *(part.readlink().name for part in linked)}
    subfolders = re.findall(r"add_subdirectory\((\w+)", (ROOT / "CMakeLists.txt").read_text())
    needed |= {"CMakeLists.txt", "pyproject.toml", PROJECT["project"]["readme"], *subfolders}
    assert needed <= copied
    ignored = (FOLDER / f"{path.name}.dockerignore").read_text().split()
    assert {name.removeprefix("!") for name in ignored if name.startswith("!")} == copied


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_compilers_and_headers_are_those_that_setup_installs(path: Path) -> None:
    setup = (ROOT / "scripts" / "setup").read_text()
    always = setup.partition("if [[ $target != demo ]]")[0]
    wanted = set(re.findall(r"^need (\S+)", always, flags=re.MULTILINE))
    assert packages(stages(path)["build"]) == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_final_images_are_built_without_a_compiler_and_not_root(path: Path) -> None:
    finals = {name: stage for name, stage in stages(path).items() if name not in ("build", "base")}
    for name, stage in finals.items():
        assert not packages(stage) & packages(stages(path)["build"]), name
        users = [rest for word, rest in stage if word == "USER"]
        assert users[-1] == "10001:10001", name
        after = stage[[word for word, _ in stage].index("USER", len(stage) - 4) :]
        assert {word for word, _ in after} <= {"USER", "EXPOSE", "CMD", "ENTRYPOINT"}, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_any_uid_has_a_home_that_it_may_write(path: Path) -> None:
    there = stages(path)
    environment = [
        rest for word, rest in there.get("base", []) + there.get("final", []) if word == "ENV"
    ]
    assert "HOME=/tmp USER=kvxfer" in " ".join(environment)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_exist(path: Path) -> None:
    extras = re.findall(r"\.whl\)\[([a-z,]+)\]", path.read_text())
    known = PROJECT["project"]["optional-dependencies"]
    assert {extra for group in extras for extra in group.split(",")} <= known.keys()


def test_images_are_those_of_the_chart() -> None:
    values = (ROOT / "deploy" / "helm" / "kvxfer" / "values.yaml").read_text()
    built = {tag for path in FILES for tag in re.findall(r"-t (\S+):", path.read_text())}
    assert built == {"kvxfer", "kvxfer-worker", "kvxfer-vllm"}
    assert all(re.search(rf"\b{name}\b", values) for name in built)
