"""Loads another checkpoint into a live vLLM: `python reload_probe.py MODEL OTHER RANKS`, in vLLM's
environment.

Prints a record: the `boxes` that each rank wants; the errors for a trainer that lacks a parameter,
for one with scales that the model does not have, and for one with a parameter in 8 bits
(`lacking`); why the model cannot be reloaded, or "" (`refused`); whether addresses were the same
after recording and loading; and tokens of prompts: `before`, after recording (`recorded`), after
loading only what the ranks want (`loaded`), and of the other checkpoint loaded afresh (`afresh`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import ParamMeta

from kvxfer.connectors.vllm.weight_transfer.reload import (
    check_reloadable,
    load_in_place,
    windows_over,
)
from kvxfer.connectors.vllm.weight_transfer.wants import record_wants
from kvxfer.errors import WeightsMismatch
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.transfer.arena import arena_of

PROMPTS = [[5, 9, 300, 17], list(range(40, 200, 3)), [7] * 30]
IGNORED = ParamMeta("model.layers.0.self_attn.rotary_emb.inv_freq", torch.float32, (16,))
LACKING = "model.layers.1.self_attn.k_proj.weight"


class Probe:
    """Methods of each worker."""

    def addresses(self: Any) -> dict[str, int]:
        model = self.model_runner.get_model()
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.data_ptr() for name, tensor in named}

    def record(self: Any, folder: str) -> tuple[list[Any], list[str], str]:
        model = self.model_runner.get_model()
        listed = [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors_in(folder)
        ]
        self.shapes = {each.name: each.shape for each in listed}
        with set_current_vllm_config(self.vllm_config):
            self.wanted = record_wants(model, [*listed, IGNORED])
            lacking = [
                refusal(record_wants, model, each)
                for each in (
                    [e for e in listed if e.name != LACKING],
                    [*listed, ParamMeta(f"{LACKING}_scale_inv", torch.float32, (1, 1))],
                    [
                        replace(e, dtype=torch.float8_e4m3fn) if e.name == LACKING else e
                        for e in listed
                    ],
                )
            ]
        boxes = [(e.name, e.dtype, e.whole, e.offset, e.shape) for e in self.wanted]
        return boxes, lacking, refusal(check_reloadable, model)

    def load(self: Any, folder: str) -> None:
        arena = arena_of(Holdings(self.wanted))
        memory = bytearray(arena.nbytes)
        for name, tensor in tensors_in(folder):
            if name in arena.places:
                holding, offset, nbytes = arena.places[name]
                cut = tensor
                for dim, (first, length) in enumerate(
                    zip(holding.offset, holding.shape, strict=True)
                ):
                    cut = cut.narrow(dim, first, length)
                flat = cut.contiguous().view(-1).view(torch.uint8).numpy()
                memory[offset : offset + nbytes] = flat.tobytes()
        with set_current_vllm_config(self.vllm_config):
            load_in_place(
                self.model_runner.get_model(),
                self.model_config,
                self.device,
                windows_over(arena, memory, self.shapes),
            )


def refusal(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except WeightsMismatch as error:
        return str(error)
    return ""


def tensors_in(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in list(opened.keys()):
                yield name, opened.get_tensor(name)


def started(folder: str, ranks: int) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        tensor_parallel_size=ranks,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=32 << 20,
        worker_extension_cls="reload_probe.Probe",
    )


def tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], greedy)
    llm.reset_prefix_cache()
    return [list(answer.outputs[0].token_ids) for answer in answers]


def main(model: str, other: str, ranks: int) -> None:
    llm = started(model, ranks)
    told: dict[str, Any] = {"before": tokens(llm)}
    addresses = llm.collective_rpc("addresses")
    recorded = llm.collective_rpc("record", args=(other,))
    told["boxes"] = [each[0] for each in recorded]
    told["lacking"], told["refused"] = recorded[0][1:]
    told["recorded"] = tokens(llm)
    if not told["refused"]:
        llm.collective_rpc("load", args=(other,))
        told["loaded"] = tokens(llm)
    told["same_addresses"] = llm.collective_rpc("addresses") == addresses
    del llm
    if "loaded" in told:
        told["afresh"] = tokens(started(other, ranks))
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
