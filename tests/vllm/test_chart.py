"""The command lines that the Helm chart gives to vLLM, by vLLM's own parser."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.deploy.chart import VALUE_SETS, render, value_set
from tests.deploy.programs import expanded
from verify.processes.vllm.servers import VLLM_PYTHON

# Runs in vLLM's environment: vLLM's parser parses each line of stdin, a JSON list of options.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    taken = parser.parse_args(json.loads(line))
    role = taken.kv_transfer_config.kv_role
    print(role, taken.port, taken.shutdown_timeout, taken.nnodes, taken.headless)
"""
SETS = {path.stem: path for path in VALUE_SETS}


@pytest.mark.native
@pytest.mark.timeout(300)
def test_vllm_accepts_the_options_of_the_chart() -> None:
    lines = [
        json.dumps(expanded(container, container.arguments))
        for name in ("vllm", "leaderworkerset")
        for container in render(value_set(SETS[name])).containers()
        if container.spec["name"] == "vllm"
    ]
    done = subprocess.run(
        [VLLM_PYTHON, "-c", PARSE],
        input="\n".join(lines),
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "kv_producer 8100 300 1 False",
        "kv_consumer 8100 300 1 False",
        "kv_producer 8100 120 2 False",
        "kv_producer 8100 120 2 True",
        "kv_consumer 8100 120 2 False",
        "kv_consumer 8100 120 2 True",
    ]
