"""What of SGLang's KV pools and metadata can be mapped, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.sglang.pools import Metadata, layout_of
from kvxfer.errors import InvalidArgument


def pool(**other: Any) -> Any:
    return SimpleNamespace(
        **{"page_size": 16, "kv_data_ptrs": [1] * 8, "kv_item_lens": [1024] * 8} | other
    )


def test_k_and_v_of_each_layer() -> None:
    layout = layout_of(pool(), mla=False)
    assert (layout.num_layers, layout.parts, layout.part_bytes) == (4, ("K", "V"), 1024)


def test_one_latent_vector_for_each_layer_with_mla() -> None:
    layout = layout_of(pool(), mla=True)
    assert (layout.num_layers, layout.parts, layout.part_bytes) == (8, ("KV",), 1024)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"kv_item_lens": [1024] * 7 + [512]}, r"\[512, 1024\] bytes"),
        ({"kv_data_ptrs": [1] * 7}, "7 KV buffers"),
        ({"page_size": 3}, "a page of 3 tokens"),
    ],
)
def test_other_pools_are_refused(other: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        layout_of(pool(**other), mla=False)


def test_a_row_of_metadata_goes_from_one_place_to_another() -> None:
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
