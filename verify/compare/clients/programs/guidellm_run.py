"""guidellm's benchmark of synthetic texts: chats and completions, several at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import session

REQUESTS = 12


def ask(url: str, model: str) -> None:
    found: dict[str, Any] = {}
    for route in ("/v1/completions", "/v1/chat/completions"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = {
                "--backend": f"kind=openai_http,target={url},model=tiny,request_format={route}",
                "--profile": "kind=concurrent,streams=3",
                "--constraint": f"kind=max_requests,count={REQUESTS}",
                "--data": "kind=synthetic_text,prompt_tokens=96,output_tokens=12",
                "--tokenizer": f"kind=hf_auto,model={model}",
                "--seed": "kind=static,value=3",
                "--output": f"kind=json,path={report}",
            }
            words = [word for option in options.items() for word in option]
            command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *words]
            subprocess.run(command, check=True, stdout=sys.stderr)
            [benchmark] = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]
        done = requests["successful"]
        found[route] = {
            "ended": {state: len(requests[state] or ()) for state in sorted(requests)},
            "tokens": sorted([each["prompt_tokens"], each["output_tokens"]] for each in done),
        }
    session.tell("guidellm", f"{REQUESTS} completions and {REQUESTS} chats, three at once", found)


session.run(ask)
