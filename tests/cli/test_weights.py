"""`kvxfer weights plan` as a process."""

from __future__ import annotations

import json
import subprocess

import pytest

from kvxfer.weights.document import as_document
from kvxfer.weights.models import model_map
from verify.processes.programs import clean_environment, kvxfer

pytestmark = pytest.mark.native


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        kvxfer("weights", "plan", *arguments),
        env=clean_environment(COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SMALL = ("--model", "llama-3-8b", "--train", "8", "--infer", "4")


def test_the_figures_of_a_plan():
    ended = plan(*SMALL, "--gbps", "200")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert lines[0] == "llama-3-8b: 291 parameters from 8 training ranks to 4 inference ranks"
    assert "sender 2.008 GB 2.008 GB 2.008 GB 1.000" in lines
    assert "receiver NIC 4.016 GB 4.016 GB 4.016 GB 1.000" in lines
    assert lines[-1] == "0.161 s on the wire, at 200 Gbit/s for each NIC"


def test_a_map_from_a_file_as_json(tmp_path):
    path = tmp_path / "map.json"
    path.write_bytes(as_document(model_map("llama-3-8b", 8, 4)))
    ended = plan("--file", str(path), "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    of_file, of_model = json.loads(ended.stdout), json.loads(plan(*SMALL, "--json").stdout)
    assert of_file["senders"]["balance"] == 1.0
    assert of_file["nbytes"] == 16_062_119_936
    assert of_file["peak_memory_bytes"] > 0
    changes = {"model", "plan_seconds", "peak_memory_bytes"}
    assert {key for key in of_file if of_file[key] != of_model[key]} <= changes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model is given; pass --model kimi-k2 or llama-3-8b, or --file"),
        (("--model", "best", "--train", "1", "--infer", "1"), "'best' is not a known model"),
        (("--model", "kimi-k2"), "pass --train and --infer"),
        (("--file", "/nowhere.json"), "the weight map /nowhere.json cannot be read"),
        (("--file", "/nowhere.json", "--train", "1"), "leave the options out"),
        ((*SMALL, "--gbps", "0"), "--gbps is 0.0; use more than 0"),
        ((*SMALL, "--gather-bytes", "67108864"), "use at most half of slice_bytes"),
        ((*SMALL, "--burst-bytes", "1"), "burst_bytes is 1; use slice_bytes or more"),
    ],
)
def test_an_error_is_one_line(arguments, words):
    ended = plan(*arguments)
    assert ended.returncode == 1
    assert "[invalid-argument]" in ended.stderr
    assert words in " ".join(ended.stderr.split())
    assert len(ended.stderr.splitlines()) == 1
