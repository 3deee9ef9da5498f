"""The engine as other C++ programs use it: installed, found by CMake, and linked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/tests"  # scripts/test builds there, too


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of examples/native, built against an installed tree only."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "-S", ROOT, "-B", BUILD, *options, "-DKVXFER_PYTHON=OFF", "-DKVXFER_TESTS=ON")
    run("cmake", "--build", BUILD, "--target", "kvxfer_engine")
    run("cmake", "--install", BUILD, "--prefix", folder / "prefix")
    found = f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}"
    run("cmake", "-S", ROOT / "examples/native", "-B", folder / "build", *options, found)
    run("cmake", "--build", folder / "build")
    return folder / "build"


def test_pages_move_between_two_engines_of_one_thread(examples: Path) -> None:
    assert run(examples / "pages") == "4 pages, 4 writes\n"


def test_latency_is_measured_beside_that_of_handwritten_code(examples: Path) -> None:
    lines = run(examples / "latency", "200").splitlines()
    figure = r" +[\d.]+ us"
    for fabric, line in zip(("local", "tcp"), lines, strict=True):
        assert re.fullmatch(rf"{fabric} +engine{figure} +by hand{figure} +ratio +[\d.]+", line), (
            lines
        )


def test_headers_of_the_installed_tree_are_the_public_ones(examples: Path) -> None:
    headers = (examples.parent / "prefix/include/kvxfer").iterdir()
    assert sorted(header.name for header in headers) == ["engine.hpp", "error.hpp", "types.hpp"]
