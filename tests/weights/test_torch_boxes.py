from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from kvxfer.errors import InvalidArgument
from kvxfer.weights.torch_boxes import NOTHING, Box, box_of


@pytest.mark.parametrize(
    ("mesh", "coordinate", "placements", "local", "box"),
    [
        ((4,), (0,), (Shard(0),), (3, 6), Box((0, 0), (3, 6))),
        ((4,), (3,), (Shard(0),), (1, 6), Box((9, 0), (1, 6))),
        ((8,), (5,), (Shard(0),), (0, 6), NOTHING),
        ((4,), (2,), (Replicate(),), (10, 6), Box((0, 0), (10, 6))),
        ((2, 2), (1, 0), (Shard(1), Shard(0)), (5, 3), Box((0, 3), (5, 3))),
        ((2, 2), (1, 1), (Shard(0), Shard(0)), (2, 6), Box((8, 0), (2, 6))),
        ((2, 2), (0, 1), (_StridedShard(0, split_factor=2), Shard(0)), (3, 6), Box((5, 0), (3, 6))),
        ((2, 2), (1, 1), (Replicate(), Shard(1)), (10, 3), Box((0, 3), (10, 3))),
        # The rows are divided along the second axis, the first, then the third: 5 to 9, 8 and 9, 8.
        (
            (2, 2, 2),
            (1, 1, 0),
            (_StridedShard(0, split_factor=2), Shard(0), Shard(0)),
            (1, 6),
            Box((8, 0), (1, 6)),
        ),
    ],
)
def test_a_rank_has_the_box_that_its_placements_say(
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local: tuple[int, ...],
    box: Box,
) -> None:
    assert box_of("w", (10, 6), mesh, coordinate, placements, local) == box


def test_fsdp_over_tensor_parallelism_is_understood_for_any_length(rng: random.Random) -> None:
    """torch's own offsets are another rank's if the length does not divide evenly."""
    refused = 0
    for _ in range(300):
        length, dp, tp = rng.randint(1, 70), rng.randint(1, 5), rng.randint(2, 8)
        placements = (_StridedShard(0, split_factor=tp), Shard(0))
        for rank in range(dp * tp):
            d, t = divmod(rank, tp)
            have = chunk(chunk(torch.arange(length), tp, t), dp, d).tolist()
            try:
                box = box_of("w", (length,), (dp, tp), (d, t), placements, (len(have),))
            except InvalidArgument as error:
                assert "single box" in str(error)
                refused += 1
                continue
            assert box == (Box((have[0],), (len(have),)) if have else NOTHING), (length, dp, tp)
    assert refused < 50


def chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    found = tensor.chunk(parts)
    return found[index] if index < len(found) else tensor[:0]


def test_a_strided_shard_alone_is_no_box() -> None:
    with pytest.raises(InvalidArgument, match=r"w: .*\[8\] is not a single box"):
        box_of("w", (8,), (2,), (0,), (_StridedShard(0, split_factor=2),), (4,))


def test_a_rank_that_fits_two_readings_of_its_placements_is_refused() -> None:
    """If 27 is divided by 4 and then by 3, rank (2, 2) has one element in each reading, but not the
    same one."""
    placements = (_StridedShard(0, split_factor=4), Shard(0))
    with pytest.raises(InvalidArgument, match="not a single box"):
        box_of("w", (27,), (3, 4), (2, 2), placements, (1,))


@pytest.mark.parametrize(
    ("placement", "local", "text"),
    [
        (Partial(), (10,), "w is .*summand; redistribute"),
        (Shard(0), (4,), r"w: this rank has \[4\] of \[10\].*from_local"),
        (Shard(0), (0,), r"w: this rank has \[0\] of \[10\]"),
    ],
)
def test_other_placements_are_refused_by_name(
    placement: Placement, local: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        box_of("w", (10,), (2,), (0,), (placement,), local)
