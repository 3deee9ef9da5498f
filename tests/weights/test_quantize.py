"""Boxes of simulated ranks, quantised with exchanged maxima, equal boxes of the whole quantised."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.quantize import (
    FP8_BLOCKS,
    FP8_CHANNELS,
    FP8_TENSOR,
    INT8_CHANNELS,
    Quantization,
    as_sent,
    cell_of,
    cells_of,
    make_scales,
    quantize_box,
    take_maxima,
)
from kvxfer.weights.scale_exchange import Kind, exchange_of
from kvxfer.weights.torch_boxes import Box
from tests.weights.whole_quantization import dequantized, quantized

ALL = (FP8_BLOCKS, FP8_CHANNELS, FP8_TENSOR, INT8_CHANNELS)
SMALL = (
    FP8_BLOCKS._replace(cell=(4, 3)),
    INT8_CHANNELS._replace(cell=(2, 0)),
    FP8_CHANNELS,
    FP8_TENSOR,
    INT8_CHANNELS,
)

Sent = tuple[torch.Tensor, torch.Tensor]


def of_ranks(
    parameters: dict[str, tuple[Quantization, torch.Tensor]], ranks: list[dict[str, Box]]
) -> list[dict[str, Sent]]:
    """Returns what each rank sends, with the scales of its box's cells, after one exchange of the
    maxima of all parameters."""
    parts = [
        [
            (name, Kind(parameters[name][0], tuple(parameters[name][1].shape), box))
            for name, box in each.items()
        ]
        for each in ranks
    ]
    held = [
        {kind: [name for name, each in having if each == kind] for _, kind in having}
        for having in parts
    ]
    exchanges = [exchange_of(held, rank) for rank in range(len(ranks))]
    maxima: list[dict[str, torch.Tensor]] = []
    vector = torch.zeros(exchanges[0].length)
    for exchange, each in zip(exchanges, parts, strict=True):
        assert (exchange.names, exchange.length) == (exchanges[0].names, exchanges[0].length)
        taken = {}
        for name, kind in each:
            taken[name] = torch.full(cells_of(kind.cell, kind.box).shape, 7e7)
            take_maxima(parameters[name][1][within(kind.box)], kind.cell, kind.box, taken[name])
        for name, (own, at) in exchange.shared.items():
            vector[at] = torch.maximum(vector[at], taken[name].flatten()[own])
        maxima.append(taken)
    sent: list[dict[str, Sent]] = []
    for exchange, each, taken in zip(exchanges, parts, maxima, strict=True):
        made = {}
        for name, (how, whole, box) in each:
            if name in exchange.shared:
                own, at = exchange.shared[name]
                taken[name].flatten()[own] = vector[at]
            make_scales(taken[name], how.dtype)
            values = torch.empty(box.shape, dtype=getattr(torch, how.dtype))
            cell = cell_of(how, whole)
            quantize_box(parameters[name][1][within(box)], cell, box, taken[name], values)
            made[name] = (values, taken[name])
        sent.append(made)
    return sent


def within(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True)
    )


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def assert_are_of_the_whole(
    parameters: dict[str, tuple[Quantization, torch.Tensor]], ranks: list[dict[str, Box]]
) -> None:
    for boxes, sent in zip(ranks, of_ranks(parameters, ranks), strict=True):
        for name, (values, scales) in sent.items():
            how, weight = parameters[name]
            whole, all_scales = quantized(weight, how)
            box, shape = boxes[name], tuple(weight.shape)
            assert same(values, whole[within(box)])
            cells = cells_of(cell_of(how, shape), box)
            offset, shape = as_sent(how, cells.offset, 0), as_sent(how, cells.shape, 1)
            assert same(scales.view(shape), all_scales[within(Box(offset, shape))])


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Draws ranges that cover a dimension."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
    edges = [0, *sorted(inner), length]
    return [(first, end - first) for first, end in pairwise(edges)]


@st.composite
def parameter(draw: st.DrawFn) -> tuple[Quantization, torch.Tensor, list[Box]]:
    """Draws a parameter, and boxes that cover it."""
    shape = draw(st.lists(st.integers(1, 13), min_size=2, max_size=3))
    ranges = [draw(cuts(length)) for length in shape]
    boxes = [Box((), ())]
    for along in ranges:
        boxes = [
            Box((*box.offset, first), (*box.shape, size)) for box in boxes for first, size in along
        ]
    if draw(st.booleans()):  # one box is the whole
        boxes.append(Box((0,) * len(shape), tuple(shape)))
    made = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    weight = torch.randn(*shape, generator=made) * 10.0 ** draw(st.integers(-3, 3))
    weight *= torch.rand(*shape, generator=made) < draw(st.sampled_from((0.2, 1.0)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    return draw(st.sampled_from(SMALL)), weight.to(dtype), boxes


@given(st.lists(parameter(), min_size=1, max_size=3), st.integers(1, 5), st.randoms())
def test_any_boxes_get_the_bytes_of_the_whole(
    drawn: list[tuple[Quantization, torch.Tensor, list[Box]]], at_least: int, random: object
) -> None:
    """Each box is at one rank, or at two that are replicas; some ranks have none."""
    ranks: list[dict[str, Box]] = [{} for _ in range(max(at_least, *(len(d[2]) for d in drawn)))]
    for number, (_, _, boxes) in enumerate(drawn):
        having = list(range(len(ranks)))
        random.shuffle(having)  # type: ignore[attr-defined]
        for place, rank in enumerate(having[: len(boxes) + 1]):
            ranks[rank][f"p{number}"] = boxes[place % len(boxes)]
    parameters = {f"p{number}": (how, weight) for number, (how, weight, _) in enumerate(drawn)}
    assert_are_of_the_whole(parameters, ranks)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_300_rows_and_of_columns(how: Quantization, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(7)
    rows = torch.randn(300, 200, generator=made).to(dtype)
    columns = torch.randn(130, 257, generator=made).to(dtype)
    ranks = [
        {
            "rows": Box((75 * rank, 0), (75, 200)),
            "columns": Box((0, 65 * rank), (130, min(65, 257 - 65 * rank))),
        }
        for rank in range(4)
    ]
    assert_are_of_the_whole({"rows": (how, rows), "columns": (how, columns)}, ranks)


def test_a_box_of_several_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.weights.quantize._SLAB_OF_CPU", 5 * 200)
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    ranks = [{"w": Box((0, 0), (133, 200))}, {"w": Box((133, 0), (167, 200))}]
    for how in ALL:
        assert_are_of_the_whole({"w": (how, weight)}, ranks)


def test_names_and_shapes_are_those_of_checkpoints() -> None:
    whole = (300, 257)
    found = {}
    for how in ALL:
        grid = cells_of(cell_of(how, whole), Box((0, 0), whole))
        found[how] = ("q_proj.weight" + how.suffix, as_sent(how, grid.shape, 1))
    assert found == {
        FP8_BLOCKS: ("q_proj.weight_scale_inv", (3, 3)),
        FP8_CHANNELS: ("q_proj.weight_scale", (300, 1)),
        FP8_TENSOR: ("q_proj.weight_scale", (1,)),
        INT8_CHANNELS: ("q_proj.weight_scale", (300, 1)),
    }
    assert as_sent(FP8_TENSOR, (8, 1, 1), 1) == (8,)


@pytest.mark.parametrize("how", ALL)
def test_the_product_with_the_scale_is_within_half_a_step(how: Quantization) -> None:
    weight = torch.randn(300, 257, generator=torch.Generator().manual_seed(3))
    [sent] = of_ranks({"w": (how, weight)}, [{"w": Box((0, 0), (300, 257))}])
    values, scales = sent["w"]
    scales = scales.view(as_sent(how, tuple(scales.shape), 1))
    error = (dequantized(values, scales, how) - weight).abs()
    spread = dequantized(torch.ones(300, 257), scales, how)
    if how.dtype == "int8":
        assert (error <= spread * 0.5001).all()
    else:  # three bits of mantissa; below 2^-6 steps of 2^-9
        assert (error <= torch.maximum(weight.abs() * 2**-4, spread * 2**-10) * 1.0001).all()


def test_zeros_and_magnitudes_too_small_for_a_scale_are_sent_as_zeros_of_scale_1() -> None:
    for most in (0.0, 1e-45, 5e-36):
        weight = torch.full((4, 4), most)
        [sent] = of_ranks({"w": (FP8_TENSOR, weight)}, [{"w": Box((0, 0), (4, 4))}])
        assert sent["w"][1].tolist() == [[1.0]]
        assert not sent["w"][0].float().any()


def test_the_greatest_magnitude_is_the_greatest_value() -> None:
    weight = torch.tensor([[-3.3e38, 1e-30], [1.7e38, 0.0]])
    [sent] = of_ranks({"w": (FP8_TENSOR, weight)}, [{"w": Box((0, 0), (2, 2))}])
    assert sent["w"][0].float().tolist() == [[-448.0, 0.0], [224.0, 0.0]]


def test_the_weights_are_left_as_they_were() -> None:
    weight = torch.randn(9, 9)
    before = weight.clone()
    for how in ALL:
        of_ranks({"w": (how, weight)}, [{"w": Box((0, 0), (9, 9))}])
    assert torch.equal(weight, before)


def test_only_scales_that_ranks_share_are_exchanged() -> None:
    """Rows 0-127 and 128-299 share no block; rows 0-99 and 100-299 share the first of 3 rows."""
    whole = (300, 200)

    def parts(border: int) -> list[dict[Kind, list[str]]]:
        boxes = (Box((0, 0), (border, 200)), Box((border, 0), (300 - border, 200)))
        return [{Kind(FP8_BLOCKS, whole, box): ["w"]} for box in boxes] * 2  # and replicas

    assert exchange_of(parts(128), 0).length == 0
    assert exchange_of(parts(128), 0).shared == {}
    shared = exchange_of(parts(100), 1)
    assert shared.length == 2
    assert shared.shared["w"].own.tolist() == shared.shared["w"].at.tolist() == [0, 1]


def test_a_group_without_all_elements_of_a_scale_is_refused() -> None:
    kind = Kind(FP8_BLOCKS, (300, 200), Box((0, 0), (100, 200)))
    with pytest.raises(InvalidArgument, match=r"a\.weight.*group of all training ranks"):
        exchange_of([{kind: ["a.weight"]}] * 2, 0)
    assert not exchange_of([{kind._replace(box=Box((0, 0), (128, 200))): ["a"]}], 0).shared


def test_ranks_that_quantise_differently_are_refused() -> None:
    kind = Kind(FP8_BLOCKS, (4, 4), Box((0, 0), (4, 4)))
    with pytest.raises(WeightsMismatch, match=r"a\.weight.*at another"):
        exchange_of([{kind: ["a.weight"]}, {kind._replace(how=FP8_TENSOR): ["a.weight"]}], 0)
