"""Weight maps of known models, in a usual layout of training and of inference.

Training is sharded as FSDP2 does it: dense parameters along their first dimension over all ranks;
experts by expert parallelism, and along their first dimension over the remaining ranks. At
inference, groups of `tensor` ranks share attention and dense layers, and experts are spread over
all ranks. Names are those of the checkpoint: of vLLM's fused parameters (`qkv_proj`,
`gate_up_proj`), a rank wants the slices that form them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvxfer.errors import InvalidArgument
from kvxfer.weights.maps import Parameters, Side, WeightMap

_BF16: Final = "bfloat16"
_LAYER: Final = "model.layers.{layer}."


class _Tensor(NamedTuple):
    """A parameter, and the dimension along which inference splits it; None if each rank has the
    whole. `heads`: the number of KV heads that are split; further ranks have replicas."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None = None
    layers: tuple[int, int] | None = None
    experts: int = 0
    heads: int = 0


def _linear(name: str, out: int, into: int, dimension: int | None, first: int, end: int) -> _Tensor:
    return _Tensor(f"{_LAYER}{name}.weight", (out, into), dimension, (first, end))


def _norm(name: str, size: int, end: int) -> _Tensor:
    return _Tensor(f"{_LAYER}{name}.weight", (size,), None, (0, end))


def _mlp(name: str, hidden: int, inner: int, first: int, end: int) -> list[_Tensor]:
    return [
        _linear(f"{name}.gate_proj", inner, hidden, 0, first, end),
        _linear(f"{name}.up_proj", inner, hidden, 0, first, end),
        _linear(f"{name}.down_proj", hidden, inner, 1, first, end),
    ]


def _ends(vocabulary: int, hidden: int) -> list[_Tensor]:
    return [
        _Tensor("model.embed_tokens.weight", (vocabulary, hidden), 0),
        _Tensor("lm_head.weight", (vocabulary, hidden), 0),
        _Tensor("model.norm.weight", (hidden,)),
    ]


def _kimi_k2() -> list[_Tensor]:
    """Lists the parameters of moonshotai/Kimi-K2, config.json: the architecture of DeepSeek-V3."""
    hidden, layers, heads, experts, inner = 7168, 61, 64, 384, 2048
    q_lora, kv_lora, rope, nope, value = 1536, 512, 64, 128, 128
    expert = f"{_LAYER}mlp.experts.{{expert}}."
    return [
        *_ends(163840, hidden),
        _norm("input_layernorm", hidden, layers),
        _norm("post_attention_layernorm", hidden, layers),
        _norm("self_attn.q_a_layernorm", q_lora, layers),
        _norm("self_attn.kv_a_layernorm", kv_lora, layers),
        _linear("self_attn.q_a_proj", q_lora, hidden, None, 0, layers),
        _linear("self_attn.q_b_proj", heads * (nope + rope), q_lora, 0, 0, layers),
        _linear("self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden, None, 0, layers),
        _linear("self_attn.kv_b_proj", heads * (nope + value), kv_lora, 0, 0, layers),
        _linear("self_attn.o_proj", hidden, heads * value, 1, 0, layers),
        *_mlp("mlp", hidden, 18432, 0, 1),
        _linear("mlp.gate", experts, hidden, None, 1, layers),
        _Tensor(f"{_LAYER}mlp.gate.e_score_correction_bias", (experts,), None, (1, layers)),
        *_mlp("mlp.shared_experts", hidden, inner, 1, layers),
        _Tensor(f"{expert}gate_proj.weight", (inner, hidden), None, (1, layers), experts),
        _Tensor(f"{expert}up_proj.weight", (inner, hidden), None, (1, layers), experts),
        _Tensor(f"{expert}down_proj.weight", (hidden, inner), None, (1, layers), experts),
    ]


def _llama_3_8b() -> list[_Tensor]:
    """Lists the parameters of meta-llama/Meta-Llama-3-8B, config.json."""
    hidden, layers, heads, kv_heads, head = 4096, 32, 32, 8, 128
    of_kv = [
        _linear(f"self_attn.{name}_proj", kv_heads * head, hidden, 0, 0, layers)._replace(
            heads=kv_heads
        )
        for name in ("k", "v")
    ]
    return [
        *_ends(128256, hidden),
        _norm("input_layernorm", hidden, layers),
        _norm("post_attention_layernorm", hidden, layers),
        _linear("self_attn.q_proj", heads * head, hidden, 0, 0, layers),
        *of_kv,
        _linear("self_attn.o_proj", hidden, heads * head, 1, 0, layers),
        *_mlp("mlp", hidden, 14336, 0, layers),
    ]


_MODELS: Final[Mapping[str, Callable[[], list[_Tensor]]]] = {
    "kimi-k2": _kimi_k2,
    "llama-3-8b": _llama_3_8b,
}
MODELS: Final = tuple(_MODELS)


def model_map(model: str, train: int, infer: int, *, tensor: int = 8) -> WeightMap:
    """Returns the map of one of MODELS, from `train` ranks to `infer` ranks, all in bf16.

    `tensor` is the most ranks that share a dense layer at inference; fewer if that does not divide
    `infer`. Raises InvalidArgument for another model, and for counts below 1.
    """
    if model not in _MODELS:
        raise InvalidArgument(f"{model!r} is not a known model; use {' or '.join(MODELS)}")
    for name, count in (("train", train), ("infer", infer), ("tensor", tensor)):
        if count < 1:
            raise InvalidArgument(f"{name} is {count}; use 1 or more")
    tensors = _MODELS[model]()
    experts = max(each.experts for each in tensors)
    together = math.gcd(infer, tensor)
    # The heads of K and V are split along kv; their replicas are along copy.
    heads = max(each.heads for each in tensors)
    kv = math.gcd(together, heads) if heads else together
    owners = math.gcd(train, experts, 64) if experts else 1
    held = Side(
        mesh={"expert": owners, "shard": train // owners},
        parameters=tuple(_held(each) for each in tensors),
    )
    wanted = Side(
        mesh={"group": infer // together, "kv": kv, "copy": together // kv},
        parameters=tuple(_wanted(each) for each in tensors),
    )
    return WeightMap(train=held, infer=wanted)


def _held(tensor: _Tensor) -> Parameters:
    """Describes a parameter at training: mesh expert, shard."""
    further = ((),) * (len(tensor.shape) - 1)
    along = ("shard",) if tensor.experts else ("expert", "shard")
    return _parameters(tensor, (along, *further), {"expert": ("expert",)})


def _wanted(tensor: _Tensor) -> Parameters:
    """Describes a parameter at inference: mesh group, kv, copy."""
    along = ("kv",) if tensor.heads else ("kv", "copy")
    split = tuple(
        along if dimension == tensor.dimension else () for dimension in range(len(tensor.shape))
    )
    return _parameters(tensor, split, {"expert": ("group", "kv", "copy")})


def _parameters(
    tensor: _Tensor, split: tuple[tuple[str, ...], ...], owner: dict[str, tuple[str, ...]]
) -> Parameters:
    each = {"layer": tensor.layers} if tensor.layers else {}
    if tensor.experts:
        each["expert"] = (0, tensor.experts)
    return Parameters(
        name=tensor.name,
        shape=tensor.shape,
        dtype=_BF16,
        each=each,
        split=split,
        owner=owner if tensor.experts else {},
    )
