"""A training rank of the tests, in vLLM's environment, with vLLM's factory and clients:
`python weight_trainer.py CHECKPOINT SERVER RANK RANKS STORE`. STORE is torch.distributed's file.

It reads an order from each line of its input, and answers it with a line of output, `{}` or
`{"error": …}`.

    init VERSION        joins; vLLM serves this version now
    load CHECKPOINT     its parameters are those of another checkpoint, in place
    send MODE           sends them; vLLM is paused with this mode
    refuse              sends them, with a pin that the first worker has to refuse
    vanish              sends them, and is killed between the pin and the commit
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from kvxfer.connectors.vllm.weight_transfer import KvxferTrainerInitInfo, PausingClient


class Client(PausingClient):
    order = ""

    def update_weights(self, update_info: Any) -> None:
        if self.order == "refuse" and update_info["action"] == "pin":
            infos = [update_info] * workers_of(self.base_url)
            infos[0] = {**update_info, "update_id": "another"}
            super().update_weights(infos)
        super().update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.order == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
        super().finish_weight_update(weight_version)


def workers_of(url: str) -> int:
    import requests

    return int(requests.get(f"{url}/get_world_size", timeout=30).json()["world_size"])


class Trainer:
    def __init__(self, checkpoint: str, server: str, rank: str, ranks: str, store: str) -> None:
        load_general_plugins()
        self.rank, self.ranks = int(rank), int(ranks)
        if self.ranks > 1:
            torch.distributed.init_process_group(
                "gloo", f"file://{store}", rank=self.rank, world_size=self.ranks
            )
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.client = Client(server)
        self.engine: Any = None

    def do(self, order: str, argument: str) -> None:
        self.client.order = order
        if order == "init":
            info = KvxferTrainerInitInfo(
                rank=self.rank, world_size=self.ranks, version=int(argument)
            )
            self.engine = WeightTransferTrainerFactory.trainer_init(
                info, client=self.client, source=ModuleSource(self.model)
            )
        elif order == "load":
            other = AutoModelForCausalLM.from_pretrained(argument, dtype=torch.float32)
            self.model.load_state_dict(other.state_dict())
        else:
            self.client._mode = argument or "wait"
            self.engine.send_weights()


def main() -> None:
    trainer = Trainer(*sys.argv[1:])
    for line in sys.stdin:
        order, _, argument = line.strip().partition(" ")
        said = {}
        try:
            trainer.do(order, argument)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    if trainer.engine is not None:
        trainer.engine.shutdown()


if __name__ == "__main__":
    main()
