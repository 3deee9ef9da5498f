"""Four training ranks over gloo (sharded_ranks.py), and what a single rank refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kvxfer.errors import InvalidArgument
from kvxfer.weights.holdings import Holdings, map_of
from kvxfer.weights.torch_state import state_of
from tests.weights.sharded_ranks import CASES, WORLD
from verify.processes.process import ROOT, Process

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the ranks have written to."""
    folder = tmp_path_factory.mktemp("ranks")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = (sys.executable, "-m", "tests.weights.sharded_ranks", folder)
    with Process("ranks", *command, environment=variables) as process:
        process.ends(seconds=200)
    return folder


@pytest.mark.parametrize("case", [each.__name__ for each in CASES])
def test_the_ranks_together_hold_each_element_where_the_map_says(ranks: Path, case: str) -> None:
    whole = load_file(ranks / f"{case}.safetensors")
    held = [holdings(ranks, case, rank) for rank in range(WORLD)]
    local = [load_file(ranks / f"{case}-{rank}.safetensors") for rank in range(WORLD)]
    train = map_of(held, []).train
    names = [name for each in train.parameters for name in each.names()]
    assert sorted([*train.tied, *names]) == sorted(whole)
    for name, same in train.tied.items():
        assert torch.equal(whole[name], whole[same])
    for each in train.parameters:
        times = torch.zeros(each.shape, dtype=torch.int8)
        for part in each.parts:
            box = tuple(
                slice(first, first + length)
                for first, length in zip(part.offset, part.shape, strict=True)
            )
            times[box] += 1
            for name in each.names():
                wanted = whole[name].view(each.shape)
                assert each.dtype == str(wanted.dtype).removeprefix("torch.")
                for rank in part.ranks:
                    assert torch.equal(local[rank][name], wanted[box])
        assert (times == 1).all()


def holdings(ranks: Path, case: str, rank: int) -> Holdings:
    return msgspec.json.decode((ranks / f"{case}-{rank}.json").read_bytes(), type=Holdings)


def test_shards_are_described_as_they_are_and_not_gathered(ranks: Path) -> None:
    shapes = {
        case: [
            {each.name: each.shape for each in holdings(ranks, case, rank).parameters}
            for rank in range(WORLD)
        ]
        for case in ("fsdp", "other_axis", "two_meshes", "replicas", "names")
    }
    assert [each.get("embed.weight") for each in shapes["fsdp"]] == [(3, 7), (3, 7), (3, 7), None]
    assert [each.get("layers.0.down.bias") for each in shapes["fsdp"]] == [(1,), (1,), (1,), None]
    assert [each["0.weight"] for each in shapes["other_axis"]] == [(3, 2)] * 4
    assert [each["up.weight"] for each in shapes["two_meshes"]] == [(3, 7), (3, 7), (2, 7), (2, 7)]
    assert [each["down.weight"] for each in shapes["two_meshes"]] == [
        (2, 5),
        (2, 5),
        (1, 5),
        (1, 5),
    ]
    assert [each["out.weight"] for each in shapes["replicas"]] == [(4, 3), (3, 3)] * 2
    assert [each.get("twice") for each in shapes["names"]] == [(3, 2), (3, 2), (3, 2), (2, 2)]
    assert [each.get("last_stage") for each in shapes["names"]] == [None, None, (5,), (5,)]
    assert {"expert.1", "expert.5"} < shapes["names"][1].keys()


def test_two_names_of_one_parameter_are_tied_on_every_rank_that_has_it(ranks: Path) -> None:
    for rank in range(WORLD):
        assert holdings(ranks, "fsdp", rank).tied == {"head.weight": "embed.weight"}


def test_a_scalar_has_one_element_and_the_rank_reports_its_host(ranks: Path) -> None:
    of_it = holdings(ranks, "names", 3)
    assert (of_it.host, of_it.zone, of_it.nics) == ("host-1", "", 2)
    assert next(each.whole for each in of_it.parameters if each.name == "scale") == (1,)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("flat", ("FullyShardedDataParallel", "fully_shard()")),
        ("short", ("some.weight", "[2] of [9]", "from_local")),
        ("summand", ("some.weight", "summand", "redistribute")),
    ],
)
def test_unknown_placements_over_several_ranks_are_refused(
    ranks: Path, case: str, texts: tuple[str, ...]
) -> None:
    for rank in range(WORLD):
        found = msgspec.json.decode((ranks / f"refusals-{rank}.json").read_bytes())
        assert all(text in found[case] for text in texts), found[case]


def test_whole_tensors_are_held_whole_and_read_where_they_are() -> None:
    weight = torch.ones(4, 3)
    state = state_of({"_orig_mod.a._checkpoint_wrapped_module.weight": weight})
    [holding] = state.holdings.parameters
    assert (holding.name, holding.offset, holding.shape) == ("a.weight", (0, 0), (4, 3))
    assert state.tensors["a.weight"].data_ptr() == weight.data_ptr()
    assert not state.tensors["a.weight"].requires_grad
    assert not state.copied


def test_parts_of_one_storage_are_not_tied() -> None:
    fused = torch.arange(12.0).view(6, 2)
    parts = {"q": fused[:2], "k": fused[2:4], "v": fused[4:], "first": fused[0], "same": fused[:2]}
    state = state_of(parts)
    assert state.holdings.tied == {"same": "q"}
    assert {name: each.tolist() for name, each in state.tensors.items()} == {
        name: each.tolist() for name, each in parts.items() if name != "same"
    }


def test_a_copy_is_as_new_as_its_last_staging() -> None:
    weight = torch.zeros(4, 3)
    state = state_of({"turned": weight.t()})
    weight += 1
    assert state.tensors["turned"].sum() == 0
    state.staged()
    assert state.tensors["turned"].sum() == 12


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"a.bias": torch.zeros(2, dtype=torch.int64)}, "a.bias.*'int64'.*rename.*sent_as"),
        ({"a.bias": torch.zeros(2, device="meta")}, "a.bias.*meta"),
        ({"a.bias": torch.zeros(2, 0)}, r"a.bias.*\[2, 0\]"),
        ({"a.bias": torch.eye(2).to_sparse()}, "a.bias.*sparse"),
        ({"a.bias": 3}, "a.bias is a int"),
        ({"a.w": torch.zeros(2), "_orig_mod.a.w": torch.zeros(2)}, "a.w is the name of two"),
    ],
)
def test_the_error_names_what_cannot_be_sent(
    parameters: dict[str, torch.Tensor], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        state_of(parameters)


def test_a_refused_dtype_may_be_sent_as_another_one_or_dropped() -> None:
    module = nn.BatchNorm1d(2)  # counts its batches in int64
    with pytest.raises(InvalidArgument, match="num_batches_tracked"):
        state_of(module)
    dropped = state_of(module, rename=lambda name: None if "batches" in name else name)
    assert "num_batches_tracked" not in dropped.tensors
    sent = state_of(module, sent_as=lambda name, dtype: "uint8" if dtype == "int64" else dtype)
    assert sent.tensors["num_batches_tracked"].dtype == torch.uint8
