"""`kvxfer simulate` as a process."""

from __future__ import annotations

import json
import subprocess

import pytest

from verify.processes.programs import clean_environment, kvxfer

pytestmark = pytest.mark.native


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        kvxfer("simulate", *arguments),
        env=clean_environment(COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SMALL = ("--instances", "6", "--hours", "0.03", "--prefill-overhead", "0.02")


def test_two_policies_side_by_side():
    ended = simulate(
        *SMALL, "--policy", "fixed", "--policy", "scaling=default", "--cost-per-hour", "2"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert lines[0].startswith("workload generated, seed 0: ")
    assert lines[1].startswith("simulated one by one: all ")
    assert "policy fixed scaling=default" in lines
    (hours,) = [line for line in lines if line.startswith("GPU hours")]
    assert hours.split()[2] == "0.2"  # 6 instances for 0.03 h
    assert any(line.startswith("per million good requests") for line in lines)
    assert "course of scaling=default" in lines


def test_a_trace_as_json_and_its_picture(tmp_path):
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "course.svg"
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 500 * n,
                    "input_length": 1024,
                    "output_length": 10,
                    "hash_ids": [1, 2],
                }
            )
            + "\n"
            for n in range(40)
        )
    )
    ended = simulate("--instances", "4", "--trace", str(trace), "--json", "--plot", str(picture))
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    (result,) = told["policies"]
    assert (told["workload"], result["simulated"], result["good"]) == ("trace.jsonl", 40, 1.0)
    assert result["cached"] > 0.5
    assert result["ttft"]["50"] > 0
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "best"), "'best' is no policy; write fixed,"),
        (("--trace", "/nowhere.csv"), "the trace /nowhere.csv cannot be read"),
        (("--plot", "course.txt"), "write a name that ends in .png, .svg, .pdf"),
    ],
)
def test_an_error_is_one_line(arguments, words):
    ended = simulate("--instances", "6", *arguments)
    assert ended.returncode == 1
    assert "[invalid-argument]" in ended.stderr
    assert words in " ".join(ended.stderr.split())
