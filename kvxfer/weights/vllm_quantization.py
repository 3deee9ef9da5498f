"""The parameters that vLLM holds in 8 bits with scales, derived from its configuration.

Two things decide this. vLLM's class of the model does not quantise some layers, whatever the
configuration says: routers in most models, Mamba's projections, heads. vllm_layers.json lists them;
tests/vllm/scales_probe.py makes it by building these classes and loading every name. Among the
others, those that the configuration lists stay wide: not quantised.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvxfer.errors import InvalidArgument
from kvxfer.weights.quantize import (
    FP8_BLOCKS,
    FP8_CHANNELS,
    FP8_TENSOR,
    INT8_CHANNELS,
    Quantization,
    Quantize,
)

_TABLES: Final = Path(__file__).with_name("vllm_layers.json")
_EXPERT_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


def quantized_for_vllm(config: object) -> Quantize:
    """Returns the `quantize` for an instance of vLLM: whether vLLM loads a parameter with scales,
    and in which format.

    Arguments:
        config: the configuration of the model that vLLM serves, with the `quantization_config` that
            vLLM is started with (also by `--hf-overrides`): the folder of the checkpoint or its
            config.json, a dict, or a configuration of transformers.

    It decides by names in the checkpoint. Raises InvalidArgument for models and quantisations that
    docs/weights.md does not list. The returned function raises it for a matrix that the model's
    checkpoints do not have, or whose scales vLLM would not load.
    """
    document = _document(config)
    scheme = _scheme(document)
    kind = str(document.get("model_type"))
    model = _Model.of(kind, scheme.table)

    @functools.cache
    def scaled(layer: _Layer, numbers: tuple[str, ...]) -> bool:
        return not scheme.keeps_wide(layer.at(numbers))

    def chosen(name: str, whole: tuple[int, ...]) -> Quantization | None:
        if len(whole) < 2:
            return None
        known, numbers = _without_numbers(name)
        if known in model.wide:
            return None
        module = known.removesuffix(".weight")
        layer = model.layers.get(module)
        if layer is None:
            raise InvalidArgument(
                f"{name} is not a matrix of a {kind} checkpoint that vLLM {model.vllm} loads; "
                "rename it, drop it by `rename`, or decide about it in a `quantize` of your own"
            )
        if layer.renamed and scheme.by_pattern:
            raise InvalidArgument(
                f"vLLM has other names than the checkpoint for layers of {kind}, so the "
                "meaning of `re:` in its list of ignored layers is unknown; list the layers"
            )
        if not scaled(layer, numbers[: layer.name.count("*")]):
            return None
        if module in layer.lost:
            raise InvalidArgument(
                f"vLLM {model.vllm} holds {name} in 8 bits and does not load its scales; have its "
                f"quantization_config keep {layer.name} wide, or send the parts by other names"
            )
        return scheme.how

    return chosen


@dataclass(frozen=True)
class _Layer:
    """A layer of vLLM, and the modules of the checkpoint that form it. `*` stands for a number."""

    name: str
    modules: tuple[str, ...]
    lost: frozenset[str]
    """Modules whose scales are not loaded."""
    renamed: bool

    def at(self, numbers: Sequence[str]) -> _Layer:
        """Returns the layer with numbers for `*`; the `*` of experts stay."""
        return _Layer(
            _numbered(self.name, numbers),
            tuple(_numbered(each, numbers[: self.name.count("*")]) for each in self.modules),
            frozenset(),
            self.renamed,
        )

    @property
    def experts(self) -> bool:
        return self.name.endswith(".experts")


@dataclass(frozen=True)
class _Model:
    """The layers that vLLM's class of a model quantises, and those that it does not."""

    vllm: str
    layers: Mapping[str, _Layer]
    """The layer of each module of the checkpoint that may have scales."""
    wide: frozenset[str]
    """Names of matrices without scales."""

    @classmethod
    def of(cls, kind: str, quantization: str) -> _Model:
        document = json.loads(_TABLES.read_text())
        kinds: set[str] = set()
        for table in document["tables"]:
            kinds |= table["kinds"].keys()
            if quantization in table["kinds"].get(kind, ()):
                layers: dict[str, _Layer] = {}
                for name in table["scaled"].keys() | table["lost"].keys():
                    lost = table["lost"].get(name, [])
                    modules = (*table["scaled"].get(name, ()), *lost)
                    layer = _Layer(name, modules, frozenset(lost), table["renamed"])
                    layers |= dict.fromkeys(modules, layer)
                return cls(document["vllm"], layers, frozenset(table["wide"]))
        raise InvalidArgument(
            f"the model_type is {kind!r}, and it is not known which of its parameters vLLM holds "
            f"in 8 bits; supported: {', '.join(sorted(kinds))}. For another model, pass a "
            "`quantize` of your own"
        )


@dataclass(frozen=True)
class _Fp8:
    """The method `fp8`, which compares names for equality. A layer of several modules is listed by
    its name, or by those of all modules. For experts, a listed name that has the layer's in it is
    enough."""

    table: str
    how: Quantization
    ignored: frozenset[str]
    by_pattern: bool = False

    def keeps_wide(self, layer: _Layer) -> bool:
        if layer.name in self.ignored:
            return True
        if layer.experts:
            return any(layer.name in each for each in self.ignored)
        if layer.modules == (layer.name,):
            # vLLM compares every name with "experts" in this way, also shared experts.
            return "experts" in layer.name and any(layer.name in each for each in self.ignored)
        return _all_or_none(layer, [each in self.ignored for each in layer.modules])


@dataclass(frozen=True)
class _CompressedTensors:
    """The method `compressed-tensors`, which compares names for equality, or matches them with a
    regular expression from their beginning. Experts are listed by all projections of expert 0."""

    table: str
    how: Quantization
    ignored: tuple[str, ...]
    by_pattern: bool

    def keeps_wide(self, layer: _Layer) -> bool:
        if layer.experts:
            leaves = {each.rpartition(".")[2] for each in layer.modules if ".experts.*." in each}
            names = [f"{layer.name}.0.{leaf}" for leaf in leaves or _EXPERT_PROJECTIONS]
            return _all_or_none(layer, [self._ignores(each) for each in names])
        if self._ignores(layer.name):
            return True
        return _all_or_none(layer, [self._ignores(each) for each in layer.modules])

    def _ignores(self, name: str) -> bool:
        return any(
            re.match(each[3:], name) is not None if each.startswith("re:") else each == name
            for each in self.ignored
        )


_Scheme: TypeAlias = _Fp8 | _CompressedTensors
"""A quantization_config. `table` names it in vllm_layers.json; `by_pattern`: whether it lists
layers by regular expressions."""


def _all_or_none(layer: _Layer, ignored: Sequence[bool]) -> bool:
    if any(ignored) and not all(ignored):
        raise InvalidArgument(
            f"the quantization_config keeps some and not all of {', '.join(layer.modules)} wide, "
            f"which are one layer in vLLM, {layer.name}; list all of them, or none"
        )
    return all(ignored)


def _document(config: object) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"the model's configuration {path}: {error}") from error
    else:
        to_dict = getattr(config, "to_dict", None)
        found = config if to_dict is None else to_dict()
    if not isinstance(found, Mapping):
        raise InvalidArgument(
            f"config is a {type(config).__name__}; pass the folder of the checkpoint, a dict, or "
            "a configuration of transformers"
        )
    return found


def _scheme(document: Mapping[str, Any]) -> _Scheme:
    config = document.get("quantization_config")
    if not isinstance(config, Mapping):
        raise InvalidArgument(
            "the model's configuration has no quantization_config, so vLLM holds every parameter "
            "wide; add the quantization_config that vLLM is started with, or leave `quantize` out"
        )
    method = config.get("quant_method")
    if method == "fp8":
        return _fp8(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    raise _refused("quant_method", method, "fp8 or compressed-tensors")


def _fp8(config: Mapping[str, Any]) -> _Fp8:
    _require(config, "activation_scheme", ("dynamic",))
    _require(config, "store_dtype", (None,))
    block = config.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise _refused("weight_block_size", block, "[128, 128], or none")
    ignored = config.get("ignored_layers") or config.get("modules_to_not_convert") or ()
    table, how = ("tensor", FP8_TENSOR) if block is None else ("blocks", FP8_BLOCKS)
    return _Fp8(table, how, frozenset(map(str, ignored)))


def _compressed_tensors(config: Mapping[str, Any]) -> _CompressedTensors:
    _require(config, "transform_config", (None, {}))
    _require(config, "kv_cache_scheme", (None,))
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _refused("config_groups", f"{len(groups)} groups", "one group")
    [group] = groups
    _require(group, "targets", (["Linear"],))
    weights = group.get("weights") or {}
    _require(weights, "num_bits", (8,))
    _require(weights, "strategy", ("channel",))
    _require(weights, "symmetric", (True,))
    _require(weights, "type", ("float", "int"))
    inputs = group.get("input_activations") or {}
    _require(inputs, "num_bits", (8,))
    _require(inputs, "dynamic", (True,))
    _require(inputs, "strategy", ("token",))
    ignored = tuple(map(str, config.get("ignore") or ()))
    table, how = ("channels", FP8_CHANNELS)
    if weights["type"] == "int":
        table, how = ("int8", INT8_CHANNELS)
    by_pattern = any(each.startswith("re:") for each in ignored)
    return _CompressedTensors(table, how, ignored, by_pattern)


def _require(config: Mapping[str, Any], member: str, known: Iterable[object]) -> None:
    if config.get(member) not in known:
        raise _refused(member, config.get(member), " or ".join(map(repr, known)))


def _refused(member: str, value: object, known: str) -> InvalidArgument:
    return InvalidArgument(
        f"{member} of the quantization_config is {value!r}; use {known}. For another one, "
        "pass a `quantize` of your own"
    )


def _without_numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the name with `*` for numbers, and the numbers."""
    parts = name.split(".")
    numbers = tuple(each for each in parts if each.isdecimal())
    return ".".join("*" if each.isdecimal() else each for each in parts), numbers


def _numbered(pattern: str, numbers: Sequence[str]) -> str:
    left = iter(numbers)
    return re.sub(r"\*", lambda found: next(left, found[0]), pattern)
