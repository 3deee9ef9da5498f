"""The mapping of SGLang's KV pools and metadata, and the pools that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.sglang.components import components_of, describe
from kvxfer.connectors.sglang.pools import Metadata, group_ids, layout_of
from kvxfer.errors import InvalidArgument
from kvxfer.layout import KvLayout


def pool(sizes: list[int], states: dict[str, list[int]] | None = None, **other: Any) -> Any:
    """Returns buffers of 10 pages, with `sizes` bytes for a page, and states of 7 items."""
    states = states or {}
    pool = {
        "page_size": 16,
        "kv_data_ptrs": [1] * len(sizes),
        "kv_data_lens": [10 * size for size in sizes],
        "kv_item_lens": sizes,
        "state_types": list(states),
        "state_data_ptrs": [[1] * len(of) for of in states.values()],
        "state_data_lens": [[7 * size for size in of] for of in states.values()],
        "state_item_lens": list(states.values()),
    }
    return SimpleNamespace(**pool | other)


def layout(pool: Any, *, mla: bool = False) -> KvLayout:
    return layout_of(components_of(pool, mla=mla), pool.page_size)


def test_k_and_v_of_each_layer() -> None:
    made = layout(pool([1024] * 8))
    assert (made.num_layers, made.parts, made.part_bytes) == (4, ("K", "V"), 1024)
    assert (made.layer_groups, made.shapes) == ((), ())


def test_one_latent_vector_for_each_layer_with_mla() -> None:
    made = layout(pool([1024] * 8), mla=True)
    assert (made.num_layers, made.parts, made.part_bytes) == (8, ("KV",), 1024)


def test_layers_of_different_sizes() -> None:
    made = layout(pool([1024, 512, 1024, 512]))
    assert [layer.part_bytes for layer in made.of_layers] == [1024, 512]
    assert made.parts == ("K", "V")


def test_k_and_v_of_different_sizes_are_a_plane_each() -> None:
    made = layout(pool([1024, 1024, 512, 512]))
    assert [layer.block_bytes for layer in made.of_layers] == [1024, 1024, 512, 512]
    assert {layer.parts for layer in made.of_layers} == {("KV",)}


def test_state_has_groups_with_separate_ids() -> None:
    parts = components_of(pool([64] * 2, {"swa": [32] * 2, "mamba": [7, 9]}), mla=False)
    made = layout_of(parts, 16)
    assert made.layer_groups == (0, 1, 2, 2)
    assert [layer.state for layer in made.of_layers] == [False, False, True, True]
    assert [layer.block_bytes for layer in made.of_layers] == [128, 64, 7, 9]
    assert group_ids(parts) == [range(10), range(10, 17), range(17, 24)]


def test_buffers_without_bytes_are_left_out() -> None:
    parts = components_of(pool([64], {"dsa": [0, 0], "swa": [0, 16]}), mla=True)
    assert [str(part) for part in parts] == ["kv 1x64", "swa 1x16"]
    assert parts[1].place == 1


def test_what_has_to_be_equal_on_both_sides_has_a_short_description() -> None:
    assert describe(components_of(pool([64] * 4), mla=False)) == ""
    assert describe(components_of(pool([64, 32]), mla=False)) == "kv 1x64 1x32"
    mamba = components_of(pool([64] * 4, {"mamba": [8, 8, 9]}), mla=False)
    assert describe(mamba) == "kv 4x64, mamba 2x8 1x9"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (pool([1024] * 8, page_size=3), "pages of 1024 bytes for 3 tokens"),
        (pool([64], {"dsa": [20]}), "dsa 1x20 have pages of 20 bytes for 16 tokens"),
        (pool([64], {"dsa_tail": [64]}), "state of the kind 'dsa_tail'"),
        (pool([64], {"swa_ring": [64]}), "state of the kind 'swa_ring'"),
        (pool([64], {"c128_state": [64]}), "state of the kind 'c128_state'"),
        (pool([64], {"request_row": [64]}), "state of the kind 'request_row'"),
        (pool([]), "no KV buffers"),
        (pool([64], kv_data_lens=[63]), "kv 1x64 have no whole item"),
    ],
)
def test_other_pools_are_refused(bad: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        layout(bad)


def test_a_row_of_metadata_moves_from_one_index_to_another() -> None:
    ours = [np.arange(12, dtype=np.uint8).reshape(3, 4), np.ones((3, 2), np.uint8)]
    theirs = [np.zeros((5, 4), np.uint8), np.zeros((5, 2), np.uint8)]
    source = Metadata([a.ctypes.data for a in ours], [4, 2])
    Metadata([a.ctypes.data for a in theirs], [4, 2]).write(4, source.read(1))
    assert theirs[0][4].tolist() == [4, 5, 6, 7]
    assert theirs[1][4].tolist() == [1, 1]
    assert not theirs[0][:4].any()


def test_metadata_of_other_buffers_is_refused() -> None:
    row = np.zeros((2, 4), np.uint8)
    with pytest.raises(InvalidArgument, match="prefill sent 5 bytes of metadata"):
        Metadata([row.ctypes.data], [4]).write(0, bytes(5))


def test_metadata_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="2000000 bytes"):
        Metadata([0], [2_000_000])
