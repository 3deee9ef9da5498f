"""Checkpoint folders: those that load, and one clear error for each that does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvxfer.errors import InvalidArgument
from kvxfer.reference.checkpoint import load_config, load_weights
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.weights import seeded_weights, weight_shapes

from .tiny import TINY


def hf_config(**changes: Any) -> dict[str, Any]:
    """`TINY` as a transformers 4 `config.json`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "max_position_embeddings": TINY.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return config | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of `TINY` in one file."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config()))
    save_file(seeded_weights(TINY, seed=2), path / "model.safetensors")
    return path


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder, load_config(folder))


def refused(folder: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        load(folder)


def test_a_checkpoint_gives_its_config_and_every_tensor(folder: Path) -> None:
    assert load_config(folder) == TINY
    weights = load(folder)
    for name, tensor in seeded_weights(TINY, seed=2).items():
        assert torch.equal(weights[name], tensor)


def test_a_sharded_checkpoint_gives_the_same_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for shard in range(3):
        part = {name: tensors[name] for name in sorted(tensors)[shard::3]}
        save_file(part, folder / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{shard}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    weights = load(folder)
    for name, tensor in tensors.items():
        assert torch.equal(weights[name], tensor)

    weight_map["model.norm.weight"] = "../model-0.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "names no file for tensor model.norm.weight")
    weight_map["model.norm.weight"] = "model-9.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "model-9.safetensors cannot be read")


def test_half_precision_weights_become_float32(folder: Path) -> None:
    tensors = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    weights = load(folder)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert torch.equal(weights["model.norm.weight"], tensors["model.norm.weight"].float())


def test_missing_files_are_named(folder: Path) -> None:
    refused(folder / "nowhere", "nowhere is not a folder")
    (folder / "model.safetensors").unlink()
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")


def test_damaged_files_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    refused(folder, "model.safetensors cannot be read")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json cannot be read")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json holds no JSON object")


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(64, 96)}, folder / "model.safetensors")
    refused(folder, f"tensor {name} has shape [64, 96]; config.json asks for [96, 64]")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, f"has no tensor {name}")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "the architecture is MistralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "the architecture is gpt2"),
        ({"model_type": None, "architectures": []}, "the architecture is nothing"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are quantized"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64' in config.json, not an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small' in config.json, not a number"),
        ({"num_attention_heads": 0}, "num_heads is 0; it has to be at least 1"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_size is 15; rotary embedding needs an even one"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json has no factor"),
        ({"rope_scaling": "llama3"}, "the rope parameters in config.json are not an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_a_config_this_engine_cannot_run_is_refused_by_name(
    changes: dict[str, Any], text: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))
    refused(folder, text)


def test_rope_of_both_config_generations_is_read(folder: Path) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = hf_config(rope_theta=500000.0, rope_scaling=llama3 | {"type": "llama3"})
    new = hf_config(rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 500000.0})
    del new["rope_theta"]
    configs: list[LlamaConfig] = []
    for config in (old, new):
        (folder / "config.json").write_text(json.dumps(config))
        configs.append(load_config(folder))
    assert configs[0] == configs[1]
    assert configs[0].rope_theta == 500000.0
    assert configs[0].rope_scaling.type == "llama3"


def test_several_end_tokens_are_read(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(hf_config(eos_token_id=[3, 9])))
    assert load_config(folder).eos_token_ids == (3, 9)


def test_seeded_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (seeded_weights(TINY, seed) for seed in (1, 1, 2))
    assert list(first) == [name for name, _ in weight_shapes(TINY)]
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
