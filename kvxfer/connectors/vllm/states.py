"""The state that recurrent layers (Mamba, linear attention) keep, as the shape of a layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvxfer.layout import MOST_SECTIONS, LayerShape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

_CONVOLVES: Final = ("MAMBA1", "MAMBA2", "SHORT_CONV", "GDN_ATTN")


def state_shape(spec: MambaSpec, tp_size: int) -> LayerShape:
    """Returns the state of a layer by its heads, which tensor parallelism splits in every section.

    A head is the smallest part that has its share of all sections. The sections are those of the
    convolution (x; x, B and C; Q, K and V), for each token of its window if the tokens are
    outermost, and the recurrent state. If they are unknown or too many, a rank has a single head.
    """
    heads, parts = _convolved(spec)
    sections: list[int] = []
    for index, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        item = dtype.itemsize
        if index or not parts:
            sections.append(math.prod(shape) * item // heads)
        elif is_conv_state_dim_first():
            sections += [part * shape[1] * item // heads for part in parts]
        else:
            sections += [part * item // heads for part in parts] * shape[0]
    if len(sections) > MOST_SECTIONS:
        heads, sections = 1, [spec.state_content_size_bytes]
    order = "DS" if is_conv_state_dim_first() else "SD"
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(spec.dtypes)]
    return LayerShape(
        num_kv_heads=heads * tp_size,
        head_size=sum(sections),
        dtype="uint8",
        order="HND",
        kv="state",
        packing=" ".join((spec.mamba_type.name, order, *dtypes)),
        sections=tuple(sections),
    )


def _convolved(spec: MambaSpec) -> tuple[int, list[int]]:
    """Returns the heads of a rank, and the channels of each projection that is convolved; no
    channels if the state does not begin with a convolution, or its projections are unknown."""
    kind, shapes = spec.mamba_type.name, spec.shapes
    if kind == "LINEAR" and len(shapes) == 1:
        return shapes[0][0], []
    if kind not in _CONVOLVES or spec.tp_replicated or len(shapes) > 2:
        return 1, []
    channels = shapes[0][0 if is_conv_state_dim_first() else 1]
    if kind in ("MAMBA1", "SHORT_CONV"):
        return channels, [channels]
    heads, head_size, state_size = shapes[1]
    values = heads * head_size
    others = (channels - values) // 2  # B and C of each group, or Q and K of each of their heads
    projections = [values, others, others] if kind == "MAMBA2" else [others, others, values]
    return math.gcd(heads, others // state_size), projections
