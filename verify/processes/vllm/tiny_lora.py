"""Makes a seeded LoRA of the tiny Llama: `python tiny_lora.py FOLDER SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

_RANK = 8
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 128, 4, 2, 32, 4  # the sizes in tiny_llama.py


def make(folder: Path, seed: int) -> None:
    """Writes an adapter whose weights are large enough that greedy tokens differ from the base
    model's."""
    torch.manual_seed(seed)
    outputs = {"q_proj": _HEADS * _HEAD_DIM, "v_proj": _KV_HEADS * _HEAD_DIM}
    weights = {}
    for layer in range(_LAYERS):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, _HIDDEN) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, _RANK) * 0.3
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
