"""What each rank of a live vLLM wants of another checkpoint, and what it computes after having
loaded just that: `python reload_probe.py MODEL OTHER RANKS`, in vLLM's environment.

Prints a record: `boxes` of each rank, whether `recording` and `loading` left addresses as they
were, and tokens of prompts: `before`, after recording (`recorded`), after loading (`loaded`), and of
the other checkpoint loaded afresh (`afresh`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

PROMPTS = [[5, 9, 300, 17], list(range(40, 200, 3)), [7] * 30]


class Probe:
    """Methods of each worker."""

    def addresses(self: Any) -> dict[str, int]:
        model = self.model_runner.get_model()
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.data_ptr() for name, tensor in named}

    def record(self: Any, folder: str) -> list[Any]:
        from kvxfer.connectors.vllm.weight_transfer.wants import CheckpointParameter, record_wants

        listed = [
            CheckpointParameter(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors_in(folder)
        ]
        unknown = CheckpointParameter("model.layers.0.nothing.inv_freq", torch.float32, (16,))
        self.shapes = {each.name: each.shape for each in listed}
        if "rotary" in folder:
            listed.append(unknown)
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.wanted = record_wants(self.model_runner.get_model(), listed)
            try:
                record_wants(self.model_runner.get_model(), listed[:-3] + listed[-2:])
            except Exception as error:
                self.refused = str(error)
            else:
                self.refused = ""
        return [[(e.name, e.dtype, e.whole, e.offset, e.shape) for e in self.wanted], self.refused]

    def load(self: Any, folder: str) -> None:
        from vllm.config import set_current_vllm_config

        from kvxfer.connectors.vllm.weight_transfer.reload import load_in_place, windows_over
        from kvxfer.weights.holdings import Holdings
        from kvxfer.weights.transfer.arena import arena_of

        arena = arena_of(Holdings(self.wanted))
        memory = bytearray(arena.nbytes)
        for name, tensor in tensors_in(folder):
            if name in arena.places:
                holding, offset, nbytes = arena.places[name]
                for dim, (first, length) in enumerate(zip(holding.offset, holding.shape)):
                    tensor = tensor.narrow(dim, first, length)
                flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                memory[offset : offset + nbytes] = flat.tobytes()
        with set_current_vllm_config(self.vllm_config):
            load_in_place(
                self.model_runner.get_model(),
                self.model_config,
                self.device,
                windows_over(arena, memory, self.shapes),
            )


def tensors_in(folder: str) -> Any:
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
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
    told["boxes"], told["refused"] = zip(*llm.collective_rpc("record", args=(other,)))
    told["recording"] = llm.collective_rpc("addresses") == addresses
    told["recorded"] = tokens(llm)
    llm.collective_rpc("load", args=(other,))
    told["loading"] = llm.collective_rpc("addresses") == addresses
    told["loaded"] = tokens(llm)
    del llm
    told["afresh"] = tokens(started(other, ranks))
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
