from __future__ import annotations

import pytest
import torch

from kvxfer.connectors.vllm.caches import layout_of, register_caches
from kvxfer.engine import Engine
from kvxfer.errors import InvalidArgument


def caches(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {f"layer.{index}": torch.zeros(shape, dtype=dtype) for index in range(3)}


async def test_heads_of_vllms_cpu_attention_are_opaque() -> None:
    tensors = caches(9, 4, 32, 2 * 64)
    layout = layout_of(tensors, 32, mla=False)
    assert (layout.kv, layout.order, layout.num_kv_heads) == ("opaque", "HND", 4)
    assert (layout.num_layers, layout.head_size, layout.dtype) == (3, 64, "bfloat16")
    assert layout.part_bytes == tensors["layer.0"][0].nbytes
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            assert cache.num_blocks == 9
            assert cache.plane(2, "KV").region.address == tensors["layer.2"].data_ptr()


@pytest.mark.parametrize("shape", [(9, 1, 16, 576), (9, 16, 576)])
def test_mla_has_one_latent_vector_per_token(shape: tuple[int, ...]) -> None:
    layout = layout_of(caches(*shape), 16, mla=True)
    assert (layout.mla, layout.head_size, layout.num_kv_heads) == (True, 576, 1)
    assert layout.part_bytes == 16 * 576 * 2


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "registered no KV caches"),
        (caches(9, 4, 16, 128), r"\[9, 4, 16, 128\] with blocks of 32 tokens"),
        (caches(9, 4, 32, 127), "without K and V"),
        (caches(9, 32, 128), "without K and V"),
        (caches(2, 9, 4, 32, 64), "there should be"),
        (caches(9, 4, 32, 128, dtype=torch.float64), "float64"),
        (caches(9, 4, 32, 128) | {"odd": torch.zeros(9, 2, 32, 128)}, "several shapes"),
        ({"layer": torch.zeros(9, 4, 32, 256)[..., ::2]}, "contiguous host memory"),
    ],
)
def test_what_cannot_be_mapped_is_refused(tensors: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        layout_of(tensors, 32, mla=False)
