"""Moves states of every recurrent layer that vLLM knows between different numbers of ranks:
`python state_probe.py`, in vLLM's environment.

A rank's state is cut here out of the state of the whole model, as vLLM's layers cut their weights.
The plan has to put every byte of it into its place at decode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvxfer.connectors.vllm.states import state_shape
from kvxfer.errors import LayoutMismatch
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout

Whole = tuple[list[int], tuple[int, ...]]
"""The channels of the whole model's projections, and its recurrent state, heads first."""
SHAPES: dict[str, tuple[Callable[[int], Any], Whole]] = {
    "MAMBA1": (lambda tp: mamba1(tp), ([64], (64, 6))),
    "MAMBA2": (lambda tp: mamba2(tp, groups=4), ([8 * 6, 4 * 5, 4 * 5], (8, 6, 5))),
    "GDN_ATTN": (lambda tp: gdn(tp), ([4 * 6, 4 * 6, 8 * 5], (8, 5, 6))),
    "KDA": (lambda tp: kda(tp), ([8 * 5] * 3, (8, 5, 5))),
    "SHORT_CONV": (lambda tp: short_conv(tp), ([48], ())),
    "LINEAR": (lambda tp: linear(tp), ([], (8, 5, 5))),
}
CONVOLVED = 3


def mamba1(tp: int) -> Any:
    return MambaStateShapeCalculator.mamba1_state_shape(tp, 64, 6, CONVOLVED + 1)


def mamba2(tp: int, groups: int) -> Any:
    return MambaStateShapeCalculator.mamba2_state_shape(tp, 48, groups, 8, 6, 5, CONVOLVED + 1)


def gdn(tp: int) -> Any:
    calculator = MambaStateShapeCalculator
    return calculator.gated_delta_net_state_shape(tp, 4, 8, 6, 5, CONVOLVED + 1)


def kda(tp: int) -> Any:
    return MambaStateShapeCalculator.kda_state_shape(tp, 8, 5, conv_kernel_size=CONVOLVED + 1)


def short_conv(tp: int) -> Any:
    return MambaStateShapeCalculator.short_conv_state_shape(tp, 48, CONVOLVED + 1)


def linear(tp: int) -> Any:
    return MambaStateShapeCalculator.linear_attention_state_shape(8, tp, 5)


def spec_of(kind: str, shapes: Any) -> MambaSpec:
    dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :]
    return MambaSpec(
        block_size=16,
        shapes=tuple(shapes),
        dtypes=dtypes,
        mamba_type=MambaAttentionBackendEnum["GDN_ATTN" if kind == "KDA" else kind],
    )


def layout_of(spec: MambaSpec, tp_size: int, rank: int) -> KvLayout:
    shape = state_shape(spec, tp_size)
    return KvLayout.from_layers([shape], 16, tp_size=tp_size, tp_rank=rank, layer_groups=(0,))


def states_of(spec: MambaSpec, whole: Whole, tp_size: int, rank: int) -> bytes:
    """Returns a rank's state, in which the value of each byte names its place in the whole
    model."""
    channels, recurrent = whole
    parts: list[torch.Tensor] = []
    shapes = list(spec.shapes)
    torch.manual_seed(7)
    if channels:
        item = spec.dtypes[0].itemsize
        shards = []
        for count in channels:
            of_all = torch.randint(256, (count, CONVOLVED, item), dtype=torch.uint8)
            shards.append(of_all.chunk(tp_size)[rank])
        mine = torch.cat(shards)
        if not mamba_utils.is_conv_state_dim_first():
            mine = mine.transpose(0, 1)
        assert tuple(mine.shape[:2]) == tuple(shapes.pop(0))
        parts.append(mine)
    if recurrent:
        item = spec.dtypes[-1].itemsize
        of_all = torch.randint(256, (*recurrent, item), dtype=torch.uint8)
        mine = of_all.chunk(tp_size)[rank]
        assert tuple(mine.shape[:-1]) == tuple(shapes.pop(0))
        parts.append(mine)
    assert not shapes
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


def moved(
    prefills: Sequence[tuple[KvLayout, bytes]], decode: KvLayout, nbytes: int
) -> tuple[bytes, list[int]]:
    """Returns a block at decode, and the number of times each byte of it was written."""
    block, times = bytearray(nbytes), [0] * nbytes
    for prefill, held in prefills:
        for layer in plan_transfer(prefill, decode).layers:
            for copy in layer.copies:
                assert copy.count == 1
                src, dst = copy.src_offset, copy.dst_offset
                block[dst : dst + copy.length] = held[src : src + copy.length]
                for at in range(dst, dst + copy.length):
                    times[at] += 1
    return bytes(block), times


def check(kind: str, ours: int, theirs: int) -> None:
    shapes_of, whole = SHAPES[kind]
    prefills = []
    for rank in range(ours):
        spec = spec_of(kind, shapes_of(ours))
        held = states_of(spec, whole, ours, rank)
        prefills.append((layout_of(spec, ours, rank), held))
    for rank in range(theirs):
        spec = spec_of(kind, shapes_of(theirs))
        wanted = states_of(spec, whole, theirs, rank)
        decode = layout_of(spec, theirs, rank)
        assert decode.block_bytes == len(wanted) == spec.state_content_size_bytes
        block, times = moved(prefills, decode, len(wanted))
        assert set(times) == {1}, (kind, ours, theirs)
        assert block == wanted, (kind, ours, theirs)


def check_repeated_groups() -> None:
    """Checks that states with repeated groups move between equal ranks only. vLLM repeats groups if
    there are fewer than ranks."""
    two, four = (layout_of(spec_of("MAMBA2", mamba2(tp, groups=1)), tp, 0) for tp in (2, 4))
    plan_transfer(two, two)
    try:
        plan_transfer(two, four)
    except LayoutMismatch as error:
        assert "num_kv_heads" in str(error)
    else:
        raise AssertionError("groups that are repeated are moved")


def main() -> None:
    for order in ("SD", "DS"):
        os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = order
        mamba_utils.get_conv_state_layout.cache_clear()
        for kind, ours, theirs in product(SHAPES, (1, 2, 4), (1, 2, 4)):
            check(kind, ours, theirs)
        check_repeated_groups()
    print("states of", len(SHAPES), "kinds")


if __name__ == "__main__":
    main()
