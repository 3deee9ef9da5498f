"""Measures the pause of an update of a live vLLM, beside vLLM's reload of the same checkpoint from
a file in the page cache. `make bench SUITE=weights` runs it in vLLM's environment.

The pause is the time from the begin of `start_weight_update` to the end of `finish_weight_update`,
in which no step runs. The weights are staged before, while vLLM serves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.vllm.weight_transfer import KvxferTrainerInitInfo
from verify.arguments import above_zero


class Client:
    """vLLM's four calls, in this process; notes when the pause begins."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.pauses: list[float] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._began = SYSTEM_CLOCK.monotonic()
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self.pauses.append(SYSTEM_CLOCK.monotonic() - self._began)


def make_model(folder: Path, layers: int) -> int:
    """Makes a Llama of about 50 MB a layer. Returns its bytes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    return sum(each.nbytes for each in model.parameters())


def measure(layers: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvxfer-pause-") as folder:
        nbytes = make_model(Path(folder), layers)
        llm = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            weight_transfer_config=WeightTransferConfig(backend="kvxfer"),
        )
        client = Client(llm)
        trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = WeightTransferTrainerFactory.trainer_init(
            KvxferTrainerInitInfo(rank=0), client=client, source=ModuleSource(trained)
        )
        staging, own = [], []
        for _ in range(rounds):
            report = engine.send_weights()  # type: ignore[func-returns-value]
            staging.append(report.stage_seconds)  # type: ignore[attr-defined]
            began = SYSTEM_CLOCK.monotonic()
            llm.collective_rpc("reload_weights")
            own.append(SYSTEM_CLOCK.monotonic() - began)
        engine.shutdown()
    pause, reload = statistics.median(client.pauses), statistics.median(own)
    return {
        "bytes": nbytes,
        "rounds": rounds,
        "staging_seconds": statistics.median(staging),
        "pause_seconds": pause,
        "reload_seconds": reload,
        "ratio": pause / reload,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench SUITE=weights", description=__doc__)
    parser.add_argument("--layers", type=above_zero, default=8, help="about 50 MB each")
    parser.add_argument("--rounds", type=above_zero, default=5)
    parser.add_argument("--json", action="store_true", help="figures instead of a table")
    options = parser.parse_args()
    os.environ.setdefault("KVXFER_CLUSTER_KEY", os.urandom(32).hex())
    found = measure(options.layers, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    size = f"{found['bytes'] / 1e6:.0f} MB of float32 on a CPU"
    table = Table(
        title=f"An update of a live vLLM, {size}; medians of {found['rounds']}",
        title_justify="left",
        box=None,
    )
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_row("staged while vLLM serves", f"{found['staging_seconds']:.3f}")
    table.add_row("pause", f"{found['pause_seconds']:.3f}")
    table.add_row(
        "vLLM's own reload from a file in the page cache", f"{found['reload_seconds']:.3f}"
    )
    table.add_row("pause / own reload", f"{found['ratio']:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
