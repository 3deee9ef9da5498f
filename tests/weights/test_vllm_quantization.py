"""The parameters that are sent in 8 bits are those that vLLM's own model classes load with scales.

vllm_ignored.json has what they load if an operator's quantization_config leaves layers
unquantised; tests/vllm/test_scales.py checks it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.weights import vllm_quantization
from kvxfer.weights.quantize import (
    FP8_BLOCKS,
    FP8_CHANNELS,
    FP8_TENSOR,
    INT8_CHANNELS,
    Quantization,
)
from kvxfer.weights.vllm_quantization import quantized_for_vllm

IGNORED = json.loads(Path(__file__).with_name("vllm_ignored.json").read_text())
TABLES = json.loads(Path(vllm_quantization.__file__).with_name("vllm_layers.json").read_text())
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
MATRIX = (128, 128)


def compressed(kind: str, **changes: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return {**config, **changes}


FORMATS: dict[str, tuple[dict[str, Any], Quantization]] = {
    "blocks": (BLOCKS, FP8_BLOCKS),
    "tensor": (FP8, FP8_TENSOR),
    "channels": (compressed("float"), FP8_CHANNELS),
    "int8": (compressed("int"), INT8_CHANNELS),
}


def of(kind: str, quantization: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": kind, "quantization_config": quantization}


@pytest.mark.parametrize("case", IGNORED, ids=lambda each: each["kind"])
def test_layers_that_the_configuration_keeps_wide(case: dict[str, Any]) -> None:
    ignored = case["quantization"].get("ignore", ())
    chosen = quantized_for_vllm(of(case["kind"], case["quantization"]))
    if case["kind"] in ("gpt_oss", "jamba") and any(each.startswith("re:") for each in ignored):
        with pytest.raises(InvalidArgument, match="other names than the checkpoint"):
            chosen("model.layers.0.self_attn.q_proj.weight", MATRIX)
        return
    lost = {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"}
    for name, scaled in case["scaled"].items():
        known = vllm_quantization._without_numbers(name)[0]
        if case["kind"] == "gpt_oss" and scaled and known in lost:
            with pytest.raises(InvalidArgument, match="does not load its scales"):
                chosen(name, MATRIX)
        else:
            assert (chosen(name, MATRIX) is not None) == scaled, name


def test_the_recorded_cases_keep_something_and_not_everything_wide() -> None:
    for case in IGNORED:
        assert set(case["scaled"].values()) == {True, False}
    assert len({case["kind"] for case in IGNORED}) >= 6


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("table", TABLES["tables"], ids=lambda each: next(iter(each["kinds"])))
def test_without_a_list_only_the_class_of_the_model_decides(
    table: dict[str, Any], quantization: str
) -> None:
    config, how = FORMATS[quantization]
    for kind, quantizations in table["kinds"].items():
        if quantization not in quantizations:
            continue
        chosen = quantized_for_vllm(of(kind, config))
        for modules in table["scaled"].values():
            for module in modules:
                name = module.replace("*", "3")
                weight = f"{name}.weight"
                assert chosen(weight, MATRIX) == how, weight
        for name in table["wide"]:
            assert chosen(name.replace("*", "3"), MATRIX) is None, name
        for modules in table["lost"].values():
            for module in modules:
                with pytest.raises(InvalidArgument, match="does not load its scales"):
                    chosen(module.replace("*", "3"), MATRIX)


WIDE = {
    "qwen2_moe": [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
    "qwen3_next": [
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
    ],
    "gpt_oss": ["model.layers.0.mlp.router.weight"],
    "mixtral": ["model.layers.0.block_sparse_moe.gate.weight"],
    "jamba": [
        "model.layers.0.mamba.x_proj.weight",
        "model.layers.0.mamba.dt_proj.weight",
        "model.layers.0.mamba.in_proj.weight",
        "model.layers.1.feed_forward.router.weight",
    ],
    "deepseek_v3": ["model.layers.1.mlp.gate.weight"],
    "nemotron_h": ["backbone.layers.0.mixer.conv1d.weight", "backbone.layers.3.mixer.gate.weight"],
    "lfm2": ["model.layers.0.conv.conv.weight"],
}


@pytest.mark.parametrize("kind", WIDE)
def test_routers_heads_and_convolutions_stay_wide(kind: str) -> None:
    chosen = quantized_for_vllm(of(kind, BLOCKS))
    assert [chosen(name, (8, 2048)) for name in WIDE[kind]] == [None] * len(WIDE[kind])


def test_modules_that_vllm_quantises_unless_they_are_listed() -> None:
    """Qwen's own FP8 checkpoints list the routers of Qwen3 MoE; otherwise vLLM wants their
    scales."""
    router, ba = "model.layers.5.mlp.gate", "model.layers.0.linear_attn.in_proj_ba"
    for kind, module in (("qwen3_moe", router), ("qwen3_next", ba)):
        name = f"{module}.weight"
        listed = {**BLOCKS, "modules_to_not_convert": [module]}
        assert quantized_for_vllm(of(kind, BLOCKS))(name, (8, 2048)) == FP8_BLOCKS
        assert quantized_for_vllm(of(kind, listed))(name, (8, 2048)) is None


def test_a_configuration_is_a_folder_a_file_or_an_object(tmp_path: Path) -> None:
    document = of("llama", FP8)
    (tmp_path / "config.json").write_text(json.dumps(document))

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return document

    name = "model.layers.0.self_attn.q_proj.weight"
    for config in (document, Config(), tmp_path, str(tmp_path / "config.json")):
        chosen = quantized_for_vllm(config)
        assert chosen(name, MATRIX) == FP8_TENSOR
        assert chosen("model.layers.0.self_attn.q_proj.bias", (128,)) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "llama"}, "no quantization_config"),
        (of("bert", FP8), "model_type is 'bert'.* supported: afmoe, .*qwen3_moe"),
        (of("llama", {"quant_method": "awq"}), "quant_method .* is 'awq'; use fp8 or compr"),
        (of("llama", {**FP8, "activation_scheme": "static"}), "activation_scheme .* is 'static'"),
        (of("llama", {**FP8, "weight_block_size": [64, 64]}), r"weight_block_size .* \[64, 64\]"),
        (of("llama", compressed("float", config_groups={})), "config_groups .* is '0 groups'"),
        (of("llama", compressed("float", transform_config={"a": 1})), "transform_config"),
        (3, "config is a int"),
        ("/not/there", "/not/there: .*No such file"),
    ],
)
def test_unknown_configurations_are_refused(config: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        quantized_for_vllm(config)


def test_a_name_that_is_not_known_is_refused() -> None:
    chosen = quantized_for_vllm(of("qwen2_moe", BLOCKS))
    with pytest.raises(InvalidArgument, match=r"value_head\.weight is not a matrix of a qwen2_moe"):
        chosen("value_head.weight", (1, 128))


def test_a_part_of_a_layer_of_vllm_is_refused() -> None:
    config = {**BLOCKS, "ignored_layers": ["model.layers.0.self_attn.q_proj"]}
    chosen = quantized_for_vllm(of("llama", config))
    with pytest.raises(InvalidArgument, match=r"some and not all of .*k_proj.*qkv_proj"):
        chosen("model.layers.0.self_attn.k_proj.weight", MATRIX)
    assert chosen("model.layers.1.self_attn.k_proj.weight", MATRIX) == FP8_BLOCKS
