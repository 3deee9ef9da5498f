"""`make bench SUITE=gpu`: its requirements, its figures, and a whole run on the CPU."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.figures import Row, Run, as_json, table
from benchmarks.gpu.needs import MODULES, complaints, header_folders, headers_in, missing_modules
from benchmarks.gpu.run import run_bench
from benchmarks.gpu.settings import on_gpu, smoke


def run(
    first_token: float, prefill: float, nbytes: int = 0, tokens: tuple[int, ...] = (1, 2)
) -> Run:
    return Run(first_token, prefill, nbytes, tokens)


ROW = Row(
    "local",
    2048,
    apart=(run(0.12, 0.10, 10**9), run(0.11, 0.10, 10**9), run(0.30, 0.10, 10**9)),
    one_process=(run(0.10, 0.10), run(0.09, 0.09), run(0.50, 0.50)),
)


def test_figures_are_medians_of_the_runs() -> None:
    assert ROW.first_token == 0.12
    assert ROW.first_token_of_one_process == 0.10
    assert ROW.ratio == pytest.approx(1.2)
    assert ROW.visible_transfer == pytest.approx(0.02)
    assert ROW.gigabytes == 1
    assert run(0.1, 0.2).visible_transfer == 0, "the transfer ended before prefill did"


def test_different_tokens_of_one_run_are_reported() -> None:
    wrong = replace(ROW, apart=(*ROW.apart, run(0.1, 0.1, tokens=(1, 3))))
    assert ROW.tokens_equal
    assert not wrong.tokens_equal
    assert table("GPU", [ROW, wrong])[-2].endswith(" equal")
    assert table("GPU", [ROW, wrong])[-1].endswith(" DIFFER")


def test_json_has_every_sample() -> None:
    (row,) = json.loads(json.dumps(as_json("GPU", [ROW])))["rows"]
    assert [each["first_token"] for each in row["apart"]] == [0.12, 0.11, 0.30]
    assert row["ratio"] == pytest.approx(1.2)


def test_missing_packages_are_named_with_the_folders_searched(tmp_path: Path) -> None:
    def nothing(module: str) -> Path | None:
        return None

    def without_jwt(module: str) -> Path | None:
        return None if module == "jwt" else tmp_path / module

    assert missing_modules(nothing) == list(MODULES.values())
    assert missing_modules(without_jwt) == ["pyjwt"]
    folders = header_folders(without_jwt)
    assert folders[:2] == [tmp_path / "pybind11/include", tmp_path / "torch/include"]
    said = complaints(["pyjwt"], folders[:2])
    assert "has no pyjwt; carry the wheels along" in said[0]
    assert str(tmp_path / "torch/include") in said[1]
    header = tmp_path / "torch/include/pybind11/pybind11.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert headers_in(folders[:2]) == tmp_path / "torch/include"
    assert complaints([], folders[:2]) == []


def test_the_cache_of_the_large_model_is_as_described() -> None:
    settings = on_gpu(5)
    assert settings.layout.stack_bytes == 16 * 64 * 1024  # a block has 16 tokens
    assert settings.blocks * 16 >= 8192 + settings.tokens


@pytest.mark.native
def test_prompts_through_two_processes_give_the_tokens_of_one() -> None:
    settings = replace(smoke(), repeats=1)
    rows = asyncio.run(run_bench(settings))
    assert [(row.fabric, row.length) for row in rows] == [
        (fabric, length) for fabric in settings.fabrics for length in settings.lengths
    ]
    for row in rows:
        assert row.tokens_equal
        assert len(row.apart) == len(row.one_process) == 1
        assert len(row.apart[0].tokens) == settings.tokens
        blocks = settings.layout.blocks_for(row.length)
        assert row.apart[0].nbytes == blocks * settings.layout.stack_bytes
