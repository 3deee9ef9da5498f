"""What the bytes of a KV cache depend on beside the prompt and its layout."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from kvxfer.errors import LayoutMismatch
from kvxfer.record import Record

WeightsVersion: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Said: TypeAlias = Annotated[str, Meta(max_length=4096)]


class ModelIdentity(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The model behind a KV cache. Two instances exchange one only where every field is equal.

    An empty field is what the model does not have, or what its engine cannot tell.
    """

    checkpoint: Annotated[_Said, Meta(examples=["5b0c2e9d7a4f41d38c6e1f2a90b7d3c4"])] = ""
    """Digest of the weights (kvxfer.checkpoint_digest), or a name that an operator gave them."""
    weights_version: WeightsVersion = 0
    """Grows with each update of the weights in place; the updater sets it."""
    model_dtype: Annotated[_Said, Meta(examples=["bfloat16"])] = ""
    """Of what the model computes, as torch names it; that of the cache is in its layout."""
    quantization: _Said = ""
    """Of the weights."""
    kv_scales: _Said = ""
    """How K and V were scaled, where the cache is of fewer bits."""
    rope: _Said = ""
    """Rotary embedding: canonical JSON of its settings."""
    sliding_window: _Said = ""
    """Tokens that attention looks back."""
    connector: Annotated[_Said, Meta(examples=["vllm/1"])] = ""
    """What of an engine's own conventions the two sides share, such as `vllm/1`."""


FIELDS: Final = ModelIdentity.__struct_fields__


def require_same_model(prefill: ModelIdentity | None, decode: ModelIdentity | None) -> None:
    """Raises LayoutMismatch with the first field that differs.

    None is an instance of an earlier version that does not tell: there is nothing to compare.
    """
    if prefill is None or decode is None:
        return
    for field in FIELDS:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            raise LayoutMismatch(field, ours, theirs)
