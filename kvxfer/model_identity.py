"""The identity of a model: everything that a KV cache depends on besides prompt and layout."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from kvxfer.errors import LayoutMismatch
from kvxfer.record import Record

WeightsVersion: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Said: TypeAlias = Annotated[str, Meta(max_length=4096)]


class ModelIdentity(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The model behind a KV cache. Two instances exchange one only if every field is equal.

    A field is empty if the model has no such property, or its engine cannot report it.
    """

    checkpoint: Annotated[_Said, Meta(examples=["5b0c2e9d7a4f41d38c6e1f2a90b7d3c4"])] = ""
    """Digest of the weights (kvxfer.checkpoint_digest), or a name that an operator gave them."""
    weights_version: WeightsVersion = 0
    """Version of the weights. The updater increases it with each update in place."""
    model_dtype: Annotated[_Said, Meta(examples=["bfloat16"])] = ""
    """Dtype in which the model computes, as torch names it; the cache's is in its layout."""
    quantization: _Said = ""
    """Quantization of the weights."""
    kv_scales: _Said = ""
    """Scaling of K and V, if the cache has fewer bits."""
    rope: _Said = ""
    """Settings of the rotary embedding as canonical JSON."""
    sliding_window: _Said = ""
    """Tokens that attention looks back."""
    connector: Annotated[_Said, Meta(examples=["vllm/1"])] = ""
    """Conventions of the engine that both sides share, such as `vllm/1`."""


FIELDS: Final = ModelIdentity.__struct_fields__


def require_same_model(prefill: ModelIdentity | None, decode: ModelIdentity | None) -> None:
    """Raises LayoutMismatch with the first field that differs.

    None stands for an instance of an earlier version, which does not report its model and is not
    compared.
    """
    if prefill is None or decode is None:
        return
    for field in FIELDS:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            raise LayoutMismatch(field, ours, theirs)
