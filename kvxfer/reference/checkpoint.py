"""Reads a Hugging Face checkpoint folder: `config.json` and safetensors, in one file or sharded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.config import LlamaConfig, config_from_hf
from kvxfer.reference.weights import weight_shapes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_config(folder: Path) -> LlamaConfig:
    """Returns the config of a checkpoint folder, named after the folder.

    Raises:
        InvalidArgument: there is no such folder, no `config.json` in it, or it describes a model
            that this engine does not run.
    """
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder; --model takes a checkpoint folder")
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidArgument(
            f"{folder} has no config.json; --model takes a Hugging Face checkpoint folder"
        )
    return config_from_hf(folder.resolve().name, _read_json(path))


def load_weights(folder: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """Returns all tensors that `config` asks for, as float32 in new memory.

    Raises:
        InvalidArgument: a file or tensor is missing, damaged or of another shape; it is named.
    """
    shapes = dict(weight_shapes(config))
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in _files(folder, list(shapes)).items():
        by_file[path].append(name)
    weights: dict[str, Tensor] = {}
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as tensors:
                present = set(tensors.keys())
                for name in names:
                    if name not in present:
                        raise InvalidArgument(f"{path} has no tensor {name}")
                    # A copy: tensors mapped from a file may lie at any alignment, and with that
                    # the last bits of a matrix product could differ between two processes.
                    weights[name] = tensors.get_tensor(name).to(torch.float32, copy=True)
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{path} cannot be read: {error}") from error
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise InvalidArgument(
                f"{folder}: tensor {name} has shape {list(weights[name].shape)}; config.json asks "
                f"for {list(shape)}"
            )
    return weights


def _files(folder: Path, names: list[str]) -> dict[str, Path]:
    """Returns the file of each tensor."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(names, folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        raise InvalidArgument(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise InvalidArgument(f"{index} has no weight_map")
    files: dict[str, Path] = {}
    for name in names:
        shard = shards.get(name)
        # The shard has to be a file of this folder, whatever the index says.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InvalidArgument(f"{index} names no file for tensor {name}")
        files[name] = folder / shard
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} holds no JSON object")
    return value
