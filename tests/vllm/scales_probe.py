"""Finds which parameters vLLM's models load with scales: `python scales_probe.py FOLDER [KIND …]`,
in vLLM's environment.

Writes the tables of `kvxfer.weights.vllm_quantization` (`vllm_layers.json`), and which parameters
of some models have scales if an operator leaves layers unquantised (`vllm_ignored.json`).

For each kind (a `model_type`), transformers makes a tiny model and its checkpoint. vLLM builds its
own class of that model on the meta device, with a quantisation, and loads each name alone, without
and with the suffix of its scales. The parameter that is written to shows how the name was loaded.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.quantization import fp8, get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as fp8_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as int8_experts,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.triton_utils import triton

SMALL: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
TOP_2: Final = {"num_experts_per_tok": 2}
SMALL_EXPERTS: Final = {**TOP_2, "moe_intermediate_size": 128}
ROUTED: Final = {
    **SMALL_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Final = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION: Final = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED: Final = {**SMALL_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 256}
MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128}
CONVOLUTION: Final = {
    "layer_types": ["conv", "full_attention"],
    "conv_dim": 256,
    "conv_dim_out": 256,
    "block_dim": 256,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "afmoe": {
        **SMALL_EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "layer_types": ["full_attention"] * 2,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "cohere2_moe": {},
    "deepseek_v2": {**ROUTED, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**ROUTED, **LATENT},
    "ernie4_5_moe": {
        **SMALL_EXPERTS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {
        **SMALL_EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True],
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["full_attention"] * 2,
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_ssm": 256, "mamba_d_state": 128},
    "gemma3_text": {},
    "gemma4_text": {},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "gpt_oss": {**TOP_2, "num_local_experts": 4},
    "granite": {},
    "granitemoe": {**TOP_2, "num_local_experts": 4},
    "granitemoehybrid": {
        **TOP_2,
        **MAMBA,
        "num_local_experts": 4,
        "shared_intermediate_size": 256,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
    },
    "jamba": {
        **TOP_2,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 128,
    },
    "lfm2": CONVOLUTION,
    "lfm2_moe": {**SMALL_EXPERTS, **CONVOLUTION, "num_experts": 4, "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 2,
        "moe_layers": [1],
    },
    "mamba": {"state_size": 16, "time_step_rank": 128},
    "mamba2": {"num_heads": 8, "state_size": 128, "n_groups": 1},
    "minimax_m2": {
        **TOP_2,
        "num_local_experts": 4,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "mistral": {},
    "mixtral": {**TOP_2, "num_local_experts": 4},
    "nemotron_h": {
        **SMALL_EXPERTS,
        "hybrid_override_pattern": "M*-E",
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 1,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 128,
        "n_shared_experts": 1,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "olmoe": {**TOP_2, "num_experts": 4},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**SHARED, "mlp_only_layers": [0]},
    "qwen3": {},
    "qwen3_5_moe_text": {**SHARED, **LINEAR_ATTENTION},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_moe": {**SMALL_EXPERTS, "num_experts": 4, "mlp_only_layers": [0]},
    "qwen3_next": {**SHARED, **LINEAR_ATTENTION},
}
"""The kinds that vLLM has a class for and that can be built without a GPU: dense ones, and all of
transformers' with experts or recurrent layers."""


def _compressed(kind: str) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True},
        "input_activations": {
            "num_bits": 8,
            "type": kind,
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        },
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


_FP8: Final = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS: Final = {**_FP8, "weight_block_size": [128, 128]}
IMAGES: Final = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
QUANTIZATIONS: Final[dict[str, dict[str, Any]]] = {
    "blocks": BLOCKS,
    "tensor": _FP8,
    "channels": _compressed("float"),
    "int8": _compressed("int"),
}
IGNORING: Final = ("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v3", "jamba", "gpt_oss")


class Copies(TorchDispatchMode):
    """A mode that notes the memory that is copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.to: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name == "aten::copy_":
            self.to.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


class Checkpoint:
    """The checkpoint of a tiny model of a kind, in a folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        saved: dict[str, Any] = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    saved[name] = opened.get_slice(name).get_shape()
        kept = {name: each.shape for name, each in model.named_parameters()}
        self.folder = folder
        self.saved = frozenset(saved)
        self.shapes = {
            name: list(shape) for name, shape in sorted({**kept, **saved}.items()) if len(shape) > 1
        }
        """The shapes of its matrices, also of those that have another name in training."""


class Built:
    """vLLM's model of a checkpoint, without memory."""

    def __init__(self, folder: Path, quantization: dict[str, Any]) -> None:
        arguments = EngineArgs(
            str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            load_format="dummy",
            max_model_len=256,
        )
        self._config = arguments.create_engine_config()
        kind = get_quantization_config(quantization["quant_method"])
        self._config.quant_config = kind.from_config(json.loads(json.dumps(quantization)))
        with set_current_vllm_config(self._config), torch.device("meta"):
            self._model = initialize_model(self._config)
        self._memory = {
            each.untyped_storage()._cdata: (name, each.dtype.itemsize)
            for name, each in self._model.named_parameters()
        }
        self._suffix = "_scale_inv" if "weight_block_size" in quantization else "_scale"
        self._int8 = "int-quantized" in quantization.values()
        self._rows = self._suffix == "_scale_inv" or "config_groups" in quantization

    def target(self, name: str, shape: list[int]) -> tuple[str, bool, bool]:
        """Returns the parameter that a name is loaded to, whether that has 8 bits, and whether vLLM
        loads its scales."""
        dtype = torch.int8 if self._int8 else torch.float8_e4m3fn
        where = self._written(name, torch.empty(shape, dtype=dtype, device="meta"))
        scales = self._written(name + self._suffix, self._scales(shape))
        if not where:
            return "", False, False
        (parameter, itemsize) = where[0]
        return parameter, itemsize == 1, bool(scales)

    def _scales(self, shape: list[int]) -> torch.Tensor:
        along = [-(-each // 128) for each in shape[-2:]]
        if self._suffix == "_scale":
            along = [shape[-2], 1]
        if not self._rows:
            along = [] if len(shape) > 2 else [1]
        return torch.empty([*shape[:-2], *along], dtype=torch.float32, device="meta")

    def _written(self, name: str, tensor: torch.Tensor) -> list[tuple[str, int]]:
        loading: Any = self._model
        with torch.no_grad(), set_current_vllm_config(self._config), Copies() as copies:
            try:
                loading.load_weights([(name, tensor)])
            except Exception:  # each class has its own for names without a home
                return []
        return sorted(self._memory[each] for each in copies.to if each in self._memory)


def pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def layer_of(module: str, parameter: str) -> str:
    """Returns vLLM's layer for a module of the checkpoint, under the module's parent."""
    if ".routed_experts." in parameter:
        before, found, _ = module.partition(".experts")
        return before + found if found else module.rpartition(".")[0] + ".experts"
    return module.rpartition(".")[0] + "." + parameter.split(".")[-2]


def layers(checkpoint: Checkpoint, built: Built) -> dict[str, Any]:
    """Returns `scaled`: the modules of each of vLLM's layers that has scales; `lost`: the same of
    layers whose scales vLLM does not load; `wide`: the names of parameters without scales;
    `renamed`: whether vLLM has other names for layers.

    A matrix that only the model in training has is one more name for a part of a known layer, such
    as experts in one tensor.
    """
    scaled: dict[str, set[str]] = {}
    lost: dict[str, set[str]] = {}
    wide: set[str] = set()
    renamed = False
    for name in sorted(checkpoint.shapes, key=lambda each: each not in checkpoint.saved):
        parameter, eight_bits, home = built.target(name, checkpoint.shapes[name])
        saved = name in checkpoint.saved
        module = name.removesuffix(".weight")
        layer = pattern(layer_of(module, parameter)) if eight_bits else ""
        if eight_bits and (saved or layer in scaled or layer in lost):
            (scaled if home else lost).setdefault(layer, set()).add(pattern(module))
            own = parameter.partition(".routed_experts.")[0]
            own = own if own != parameter else parameter.rpartition(".")[0]
            renamed |= layer_of(module, parameter) != own
        elif saved:
            wide.add(pattern(name))
    both = set().union(*scaled.values(), *lost.values()) & {
        name.removesuffix(".weight") for name in wide
    }
    assert not both, both
    return {
        "scaled": {layer: sorted(modules) for layer, modules in sorted(scaled.items())},
        "lost": {layer: sorted(modules) for layer, modules in sorted(lost.items())},
        "wide": sorted(wide),
        "renamed": renamed,
    }


def ignorings(checkpoint: Checkpoint, known: dict[str, Any]) -> Iterator[list[str]]:
    """Yields lists that an operator may leave unquantised: modules of the last layer and all
    routers, vLLM's names for layers, and one of the modules of each layer."""
    modules = [name.removesuffix(".weight") for name in checkpoint.saved & checkpoint.shapes.keys()]
    last = sorted(each for each in modules if ".1." in each)
    yield [*last, *(each for each in sorted(modules) if pattern(each) + ".weight" in known["wide"])]
    yield [each.replace("*", "1", 1) for each in known["scaled"]]
    yield [each for each in last if pattern(each) in known["scaled"]]


def patched() -> None:
    """Replaces kernels and GPUs, which loading on the meta device does not need."""
    fp8.init_fp8_linear_kernel = lambda **_: None
    fp8.select_fp8_moe_backend = lambda **_: (None, None)
    for module in (fp8_experts, int8_experts):
        for name in vars(module).keys() & {"select_fp8_moe_backend", "select_int8_moe_backend"}:
            setattr(module, name, lambda **_: (None, None))
    triton.set_allocator = lambda _: None
    sys.modules[IMAGES] = MagicMock()  # imported beside Qwen3.5's text model; needs torchvision
    registry._LazyRegisteredModel.inspect_model_cls = lambda model: (
        registry._ModelInfo.from_model_cls(model.load_model_cls())
    )

    class Gpu:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_cuda_alike" else getattr(platform, name)

    platform, moe_config.current_platform = moe_config.current_platform, Gpu()


def tables(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges equal tables."""
    alike: dict[str, dict[str, list[str]]] = {}
    for kind, quantizations in found.items():
        for quantization, table in quantizations.items():
            kinds = alike.setdefault(json.dumps(table), {})
            kinds.setdefault(kind, []).append(quantization)
    return [{"kinds": kinds, **json.loads(table)} for table, kinds in alike.items()]


def main(out: Path, kinds: list[str]) -> None:
    patched()
    found: dict[str, dict[str, Any]] = {}
    ignoring: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Checkpoint(kind, Path(folder))
            found[kind] = {
                name: layers(checkpoint, Built(checkpoint.folder, quantization))
                for name, quantization in QUANTIZATIONS.items()
            }
            if kind not in IGNORING:
                continue
            lists = list(ignorings(checkpoint, found[kind]["blocks"]))
            regular = ["re:.*self_attn.*", "re:.*layers.1.mlp.*", "lm_head"]
            for name, member in (("blocks", "modules_to_not_convert"), ("channels", "ignore")):
                for ignored in lists if member != "ignore" else [*lists, regular]:
                    quantization = {**QUANTIZATIONS[name], member: ignored}
                    built = Built(checkpoint.folder, quantization)
                    kept = {
                        name: built.target(name, shape)[1]
                        for name, shape in checkpoint.shapes.items()
                        if name in checkpoint.saved
                    }
                    ignoring.append({"kind": kind, "quantization": quantization, "scaled": kept})
    layers_known = {"vllm": vllm.__version__, "tables": tables(found)}
    for name, told in (("vllm_layers", layers_known), ("vllm_ignored", ignoring)):
        text = json.dumps(told, indent=1)
        text = re.sub(r'\[\s+("[^]{}]*")\s+\]', lambda each: re.sub(r"\s+", " ", each[0]), text)
        (out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
