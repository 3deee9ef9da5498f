"""The sizes and options of a Llama-architecture model, and how they are read from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer.errors import InvalidArgument

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The stretching of rotary frequencies beyond the context that a model was trained on."""

    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of one model. Raises `InvalidArgument` if they contradict each other.

    Unless `num_experts` is 0, each layer has that number of feed-forward networks of
    `intermediate_size`, and a router that sends each token to `experts_per_token` of them.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_position",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{self.name}: {field} is {value!r}; it has to be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                f"{self.name}: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} KV heads; the first has to be a multiple of the second"
            )
        experts, chosen = self.num_experts, self.experts_per_token
        if not (0 < chosen <= experts or chosen == experts == 0):
            raise InvalidArgument(
                f"{self.name}: experts_per_token is {chosen}, but there are {experts} experts"
            )
        if experts and self.mlp_bias:
            raise InvalidArgument(f"{self.name}: experts have no biases; set mlp_bias to false")
        if self.head_size % 2:
            raise InvalidArgument(
                f"{self.name}: head_size is {self.head_size}; rotary embedding needs an even one"
            )


# Small enough that a prompt of 1,750 bytes prefills in about a second on one core, with KV
# blocks of the size real models have: 16 KiB per token, 32 KiB per layer and block of 16.
DEMO_CONFIG = LlamaConfig(
    name="kvxfer-demo-8l",
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    max_position=16384,
)


def config_from_hf(name: str, hf: Mapping[str, Any]) -> LlamaConfig:
    """Returns the `LlamaConfig` of a Hugging Face `config.json`, of transformers 4 or 5.

    Raises:
        InvalidArgument: another architecture, a key that is missing or of the wrong type, or a
            feature this engine does not have.
    """
    architectures = hf.get("architectures") or []
    if hf.get("model_type") != "llama" or architectures not in ([], ["LlamaForCausalLM"]):
        found = ", ".join(map(str, architectures)) or hf.get("model_type") or "nothing"
        raise InvalidArgument(
            f"{name}: the architecture is {found}; this engine runs LlamaForCausalLM only"
        )
    if hf.get("quantization_config"):
        raise InvalidArgument(f"{name}: the weights are quantized; use a checkpoint that is not")
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise InvalidArgument(f"{name}: hidden_act is {activation!r}; only 'silu' is supported")
    keys = _Keys(name, hf)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    rope_theta, rope_scaling = _rope(keys)
    return LlamaConfig(
        name=name,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_size=keys.integer("head_dim", hidden_size // max(num_heads, 1)),
        max_position=keys.integer("max_position_embeddings", 2048),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        eos_token_ids=_eos(keys),
    )


class _Keys:
    """Typed look-ups in a `config.json`, with errors that name the key."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self.values = name, values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{self.name}: {key} is {value!r} in config.json, not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{self.name}: {key} is {value!r} in config.json, not a number")
        return float(value)

    def _get(self, key: str, default: float | None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise InvalidArgument(f"{self.name}: config.json has no {key}")
        return default


def _rope(keys: _Keys) -> tuple[float, RopeScaling]:
    """Returns theta and scaling: from `rope_parameters` since transformers 5, from two separate
    keys before."""
    name = keys.name
    parameters = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidArgument(f"{name}: the rope parameters in config.json are not an object")
    rope = _Keys(name, parameters)
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(type="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
        )
    raise InvalidArgument(
        f"{name}: rope_type is {kind!r}; 'default', 'linear' and 'llama3' are supported"
    )


def _eos(keys: _Keys) -> tuple[int, ...]:
    value = keys.values.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise InvalidArgument(f"{keys.name}: eos_token_id is {value!r} in config.json, no token id")
    return tuple(tokens)
