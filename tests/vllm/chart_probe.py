"""In vLLM's environment: its parser takes each command line of stdin, a JSON list per line."""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    taken = parser.parse_args(json.loads(line))
    role = taken.kv_transfer_config.kv_role
    print(role, taken.port, taken.shutdown_timeout, taken.nnodes, taken.headless)
