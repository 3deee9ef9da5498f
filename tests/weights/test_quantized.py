"""Four training ranks over gloo (quantizing_ranks.py) send the bytes of the whole model
quantised."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvxfer.errors import InvalidArgument
from kvxfer.weights.holdings import Holding, Holdings, map_of
from kvxfer.weights.quantize import FP8_BLOCKS, FP8_CHANNELS
from kvxfer.weights.torch_state import state_of
from tests.weights.quantizing_ranks import CASES, FORMATS, WORLD, format_of
from tests.weights.transfer.job import job
from tests.weights.whole_quantization import quantized
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
    command = (sys.executable, "-m", "tests.weights.quantizing_ranks", folder)
    with Process("ranks", *command, environment=variables) as process:
        process.ends(seconds=200)
    return folder


def checkpoint(ranks: Path, case: str, label: str) -> dict[str, torch.Tensor]:
    """Returns the whole model quantised."""
    found = {}
    for name, weight in load_file(ranks / f"{case}-{label}.safetensors").items():
        how = format_of(name, FORMATS[label])
        if how is None:
            found[name] = weight
        else:
            found[name], found[name + how.suffix] = quantized(weight, how)
    return found


def holdings(ranks: Path, case: str, label: str, rank: int) -> Holdings:
    file = ranks / f"{case}-{label}-{rank}.json"
    return msgspec.json.decode(file.read_bytes(), type=Holdings)


def tensors(ranks: Path, case: str, label: str, rank: int) -> dict[str, torch.Tensor]:
    return load_file(ranks / f"{case}-{label}-{rank}.safetensors")


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("case", [each.__name__ for each in CASES])
def test_each_rank_has_its_boxes_of_the_whole_quantised(ranks: Path, case: str, label: str) -> None:
    wanted = checkpoint(ranks, case, label)
    seen: dict[str, torch.Tensor] = {}
    for rank in range(WORLD):
        of_rank, local = holdings(ranks, case, label, rank), tensors(ranks, case, label, rank)
        for name, same in of_rank.tied.items():
            seen[name] = torch.ones(1)
            np.testing.assert_array_equal(as_bytes(wanted[name]), as_bytes(wanted[same]))
        for each in of_rank.parameters:
            assert (each.dtype, each.whole) == (
                str(wanted[each.name].dtype).removeprefix("torch."),
                tuple(wanted[each.name].shape),
            )
            box = tuple(
                slice(first, first + size)
                for first, size in zip(each.offset, each.shape, strict=True)
            )
            found, part = local[each.name], wanted[each.name][box]
            assert found.shape == part.shape
            np.testing.assert_array_equal(as_bytes(found), as_bytes(part), each.name)
            seen.setdefault(each.name, torch.zeros(each.whole))[box] = 1
    assert seen.keys() == wanted.keys()
    assert all(each.all() for each in seen.values())


def test_a_rank_holds_the_scales_of_its_elements(ranks: Path) -> None:
    boxes = [
        {each.name: (each.offset, each.shape) for each in parameters}
        for parameters in (holdings(ranks, "fsdp", "blocks", rank).parameters for rank in range(4))
    ]
    assert [each["up.weight"] for each in boxes] == [
        ((75 * rank, 0), (75, 200)) for rank in range(4)
    ]
    assert [each["up.weight_scale_inv"] for each in boxes] == [
        ((0, 0), (1, 2)),
        ((0, 0), (2, 2)),
        ((1, 0), (1, 2)),
        ((1, 0), (2, 2)),
    ]
    assert "few.weight_scale_inv" in boxes[2]
    assert "few.weight_scale_inv" not in boxes[3]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("nan", "down.weight has a NaN or an infinity"),
        ("infinity", "down.weight has a NaN or an infinity"),
        ("freed", "up.bias has no memory: it was freed"),
        ("sparse", "a.bias is a Tensor of the layout torch.sparse"),
        ("half", "weight has scales of elements that no rank of this process group has"),
        ("vector", "0.bias has the shape [3], and only matrices are quantised"),
        ("bytes", "0.weight is kept in torch.uint8"),
        ("mixed", "weight is quantised as"),
    ],
)
def test_all_ranks_get_the_error_of_one(ranks: Path, case: str, text: str) -> None:
    for rank in range(WORLD):
        found = msgspec.json.decode((ranks / f"refusals-{rank}.json").read_bytes())
        assert text in found[case]


def test_a_rank_outside_of_the_group_is_refused(ranks: Path) -> None:
    found = msgspec.json.decode((ranks / "refusals-3.json").read_bytes())
    assert "this rank is not in the group" in found["other half"]


@pytest.mark.parametrize("case", ["fsdp", "two_meshes"])
@pytest.mark.parametrize("label", ["blocks", "int8"])
async def test_instances_get_the_checkpoint_of_the_whole_quantised(
    ranks: Path, case: str, label: str
) -> None:
    wanted = checkpoint(ranks, case, label)
    train = [holdings(ranks, case, label, rank) for rank in range(WORLD)]
    assert {each.dtype for each in map_of(train, []).train.parameters} >= {"bfloat16", "float32"}
    whole = Holdings(
        tuple(
            Holding(
                name,
                str(each.dtype).removeprefix("torch."),
                tuple(each.shape),
                (0,) * each.dim(),
                tuple(each.shape),
            )
            for name, each in wanted.items()
        )
    )
    async with job("local", train=train, infer=[[whole], [whole]]) as at:
        pushed = [
            sender.push(1, tensors(ranks, case, label, rank))
            for rank, sender in enumerate(at.senders)
        ]
        for report in await asyncio.gather(*(each.report for each in pushed)):
            assert report.state == "committed"
        for instance in at.instances:
            [served] = instance.serves
            assert served.keys() == wanted.keys()
            for name, each in served.items():
                np.testing.assert_array_equal(each.view(np.uint8), as_bytes(wanted[name]), name)


def test_one_rank_alone_needs_no_process_group() -> None:
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(140, 150), torch.nn.LayerNorm(150)).bfloat16()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    state = state_of(module, quantize=lambda name, _: FP8_BLOCKS if name == "0.weight" else None)
    dtypes = {each.name: each.dtype for each in state.holdings.parameters}
    assert dtypes == {
        "0.weight": "float8_e4m3fn",
        "0.weight_scale_inv": "float32",
        "0.bias": "bfloat16",
        "1.weight": "bfloat16",
        "1.bias": "bfloat16",
    }
    assert state.copied == {"0.weight", "0.weight_scale_inv"}
    addresses = {name: each.data_ptr() for name, each in state.tensors.items()}
    for factor in (1, -2):
        with torch.no_grad():
            module[0].weight.copy_(before["0.weight"] * factor)
        sent = state.staged()
        assert {name: each.data_ptr() for name, each in sent.items()} == addresses
        values, scales = quantized(before["0.weight"] * factor, FP8_BLOCKS)
        np.testing.assert_array_equal(as_bytes(sent["0.weight"]), as_bytes(values))
        np.testing.assert_array_equal(as_bytes(sent["0.weight_scale_inv"]), as_bytes(scales))


def test_two_names_that_are_sent_differently_are_not_tied() -> None:
    weight = torch.ones(4, 4)
    state = state_of(
        {"embed.weight": weight, "head.weight": weight},
        quantize=lambda name, _: FP8_CHANNELS if name == "head.weight" else None,
    )
    assert state.holdings.tied == {}
    assert set(state.tensors) == {"embed.weight", "head.weight", "head.weight_scale"}


def test_scales_with_the_name_of_a_parameter_are_refused() -> None:
    parameters = {"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4)}
    with pytest.raises(InvalidArgument, match=r"a\.weight_scale is a parameter"):
        state_of(parameters, quantize=lambda name, _: FP8_CHANNELS if name == "a.weight" else None)
