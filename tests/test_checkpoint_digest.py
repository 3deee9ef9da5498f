"""One digest for one set of weights, however they are stored or loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import save_file

from kvxfer.checkpoint_digest import digest_of_folder, digest_of_tensors
from kvxfer.connectors.checkpoints import adapter_of
from kvxfer.errors import InvalidArgument

Weights: TypeAlias = dict[str, torch.Tensor]


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(1)
    return {
        "embed.weight": torch.randn(300, 64),
        "layers.0.q.weight": torch.randn(64, 64).to(torch.bfloat16),
        "layers.0.norm.weight": torch.ones(7),
        "layers.0.scale": torch.tensor(0.5),
        "experts.weight": torch.randint(-9, 9, (4, 1000), dtype=torch.int8),
        "fp8.weight": torch.randn(40, 40).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }


def saved(folder: Path, weights: Weights, *, files: int = 1) -> Path:
    folder.mkdir()
    names = sorted(weights)
    for index in range(files):
        some = {name: weights[name].contiguous() for name in names[index::files]}
        save_file(some, folder / f"model-{index}.safetensors", metadata={"format": "pt"})
    return folder


def test_files_shards_and_a_loader_agree(
    tmp_path: Path, weights: Weights, rng: random.Random
) -> None:
    whole = digest_of_folder(saved(tmp_path / "one", weights))
    assert whole == digest_of_folder(saved(tmp_path / "three", weights, files=3))
    shuffled = rng.sample(sorted(weights.items()), len(weights))
    assert whole == digest_of_tensors(iter(shuffled))
    transposed = {**weights, "embed.weight": weights["embed.weight"].T.contiguous().T}
    assert whole == digest_of_tensors(transposed)
    assert len(whole) == 32


def test_other_weights_have_another_digest(weights: Weights) -> None:
    before = digest_of_tensors(weights)
    trained = {name: tensor + 1 for name, tensor in weights.items() if name == "embed.weight"}
    renamed = {name.replace("q", "k"): tensor for name, tensor in weights.items()}
    reshaped = {**weights, "embed.weight": weights["embed.weight"].reshape(64, 300)}
    cast = {**weights, "layers.0.scale": weights["layers.0.scale"].to(torch.int32)}
    fewer = {name: tensor for name, tensor in weights.items() if name != "empty"}
    changed = [{**weights, **trained}, renamed, reshaped, cast, fewer]
    digests = {digest_of_tensors(each) for each in changed}
    assert len(digests) == len(changed)
    assert before not in digests


def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no safetensors files"):
        digest_of_folder(tmp_path)


@pytest.mark.parametrize("damage", ["short", "length", "header", "offsets"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, weights: Weights, damage: str) -> None:
    folder = saved(tmp_path / "one", weights)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "short": data[:4],
            "length": b"\xff" * 8 + data[8:],
            "header": data[:8] + b"x" + data[9:],
            "offsets": data[: len(data) // 2],
        }[damage]
    )
    with pytest.raises(InvalidArgument, match=f"{path.name} is not a safetensors file"):
        digest_of_folder(folder)


def test_an_adapter_is_named_by_its_weights_and_what_scales_them(
    tmp_path: Path, weights: Weights
) -> None:
    def adapter(name: str, **config: object) -> str:
        folder = saved(tmp_path / name, weights)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, **config}))
        return adapter_of(name, str(folder))

    first = adapter("first")
    assert len(first) == 32
    assert first == adapter("same", inference_mode=True)
    assert first != adapter("louder", lora_alpha=32)
    weights["embed.weight"] += 1
    assert first != adapter("trained")
    assert adapter_of("lost", str(tmp_path / "lost")) == "name:lost"
