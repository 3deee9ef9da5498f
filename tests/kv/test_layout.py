from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.layout import KvLayout

BASE: dict[str, Any] = {
    "num_layers": 4,
    "num_kv_heads": 8,
    "head_size": 64,
    "dtype": "bfloat16",
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("fields", "heads", "parts", "token_bytes", "block_bytes", "part_bytes"),
    [
        ({}, 8, ("K", "V"), 2048, 32768, 16384),
        ({"kv": "interleaved"}, 8, ("KV",), 2048, 32768, 32768),
        ({"kv": "joined", "head_size": 128}, 8, ("KV",), 2048, 32768, 32768),
        ({"order": "HND"}, 8, ("K", "V"), 2048, 32768, 16384),
        ({"dtype": "float32"}, 8, ("K", "V"), 4096, 65536, 32768),
        ({"dtype": "float8_e4m3fn", "block_size": 1}, 8, ("K", "V"), 1024, 1024, 512),
        ({"tp_size": 4, "tp_rank": 3}, 2, ("K", "V"), 512, 8192, 4096),
        ({"tp_size": 16, "tp_rank": 15}, 1, ("K", "V"), 256, 4096, 2048),
        ({"mla": True, "num_kv_heads": 1, "head_size": 576}, 1, ("KV",), 1152, 18432, 18432),
        (
            {"mla": True, "num_kv_heads": 1, "head_size": 576, "tp_size": 8, "tp_rank": 1},
            1,
            ("KV",),
            1152,
            18432,
            18432,
        ),
    ],
)
def test_sizes_follow_from_the_fields(
    fields: dict[str, Any],
    heads: int,
    parts: tuple[str, ...],
    token_bytes: int,
    block_bytes: int,
    part_bytes: int,
) -> None:
    layout = KvLayout(**(BASE | fields))
    assert layout.heads_per_rank == heads
    assert layout.parts == parts
    assert layout.token_bytes == token_bytes
    assert layout.block_bytes == block_bytes
    assert layout.part_bytes == part_bytes


def test_pipeline_stages_divide_the_layers() -> None:
    stages = [KvLayout(**BASE, pp_size=2, pp_rank=rank) for rank in (0, 1)]
    assert [stage.layers_per_rank for stage in stages] == [2, 2]
    assert [stage.first_layer for stage in stages] == [0, 2]


def test_ranks_count_stage_by_stage() -> None:
    layout = KvLayout(**BASE, pp_size=2, tp_size=4)
    assert layout.num_ranks == 8
    ranks = [layout.of_rank(rank) for rank in range(8)]
    assert [rank.rank for rank in ranks] == list(range(8))
    assert [(rank.pp_rank, rank.tp_rank) for rank in ranks[3:5]] == [(0, 3), (1, 0)]
    assert [rank.first_head for rank in ranks] == [0, 2, 4, 6] * 2


def test_more_ranks_than_heads_have_each_head_several_times() -> None:
    layout = KvLayout(**(BASE | {"num_kv_heads": 2}), tp_size=6)
    assert layout.head_replicas == 3
    assert [layout.of_rank(rank).first_head for rank in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10), (161, 11)]
)
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert KvLayout(**BASE).blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_layers": 0}, "KvLayout.num_layers is 0; use 1 or more"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"head_size": 64.0}, "head_size is 64.0"),
        ({"head_size": 65537}, "head_size is 65537; use 65536 or less"),
        ({"block_size": True}, "block_size is True; use a whole number"),
        ({"dtype": "float12"}, "dtype is 'float12'; use one of float32, float16"),
        ({"order": "DHN"}, "order is 'DHN'; use NHD or HND"),
        ({"kv": "mixed"}, "kv is 'mixed'; use separate or interleaved or"),
        ({"mla": 1}, "mla is 1; use true or false"),
        ({"packing": "vec"}, "packing is 'vec' with kv='separate'"),
        ({"packing": "x" * 33}, "packing has a length of 33; use 32 or less"),
        (
            {"kv": "opaque", "order": "HND", "packing": "amx", "block_size": 24},
            "'amx' with block_size 24",
        ),
        ({"mla": True}, "num_kv_heads is 8 with mla=True"),
        ({"tp_size": 3}, "tp_size is 3 for 8 KV heads"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2 of tp_size 2"),
        ({"pp_rank": 1}, "pp_rank is 1 of pp_size 1"),
        ({"pp_size": 3}, "pp_size is 3 for 4 layers"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"block_size": 65537}, "block_size is 65537; use 65536 or less"),
        ({"tp_size": 2048}, "tp_size is 2048; use 1024 or less"),
        ({"pp_size": 2048}, "pp_size is 2048; use 1024 or less"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        KvLayout(**(BASE | fields))
    assert named in str(caught.value)
