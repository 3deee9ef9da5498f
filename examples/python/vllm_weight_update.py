"""A trainer that updates the weights of a vLLM server: vLLM's own example of weight transfer, with
the backend `kvxfer`, on CPUs.

    export KVXFER_CLUSTER_KEY=$(openssl rand -hex 32) VLLM_SERVER_DEV_MODE=1
    python -m vllm.entrypoints.openai.api_server --model MODEL --port 8000 \
        --weight-transfer-config '{"backend": "kvxfer"}' &
    python examples/python/vllm_weight_update.py MODEL http://127.0.0.1:8000

MODEL is the folder of a checkpoint. For each step the trainer changes the parameters of its model,
sends them, and prints the version and what vLLM answers. The last parameters are saved in SAVE.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from kvxfer.connectors.vllm.weight_transfer import KvxferTrainerInitInfo, PausingClient

PROMPT = list(range(40, 200, 3))


def train(model: torch.nn.Module, step: int) -> None:
    """Changes the parameters visibly, in place of training."""
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def answer(server: str) -> list[int]:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    models = urllib.request.urlopen(f"{server}/v1/models")
    body["model"] = json.load(models)["data"][0]["id"]
    request = urllib.request.Request(
        f"{server}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    said: dict[str, Any] = json.load(urllib.request.urlopen(request))
    return list(said["choices"][0]["token_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("server")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save", help="folder for the last parameters")
    given = parser.parse_args()

    load_general_plugins()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    engine = WeightTransferTrainerFactory.trainer_init(
        KvxferTrainerInitInfo(rank=0),
        client=PausingClient(given.server, mode="abort"),
        source=ModuleSource(model),
    )
    print(json.dumps({"version": 0, "tokens": answer(given.server)}), flush=True)
    for step in range(1, given.steps + 1):
        train(model, step)
        engine.send_weights()
        print(json.dumps({"version": step, "tokens": answer(given.server)}), flush=True)
    engine.shutdown()
    if given.save:
        model.save_pretrained(given.save)


if __name__ == "__main__":
    main()
