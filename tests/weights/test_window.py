"""Windows give the same as the tensor that they stand for, from the box of it that is staged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.holdings import Holding
from kvxfer.weights.window import Wants, window_over

NAME = "model.layers.0.mlp.up_proj.weight"


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def wanted(read: Callable[[torch.Tensor], Any], *shape: int) -> Holding | None:
    wants = Wants()
    read(wants.window(NAME, torch.float32, shape))
    holdings = wants.holdings()
    return holdings[0] if holdings else None


def staged(whole: torch.Tensor, holding: Holding) -> torch.Tensor:
    """Returns a window over what `holding` wants of the tensor."""
    cut = whole.reshape(holding.whole)
    for dim, (first, length) in enumerate(zip(holding.offset, holding.shape, strict=True)):
        cut = cut.narrow(dim, first, length)
    return window_over(holding, cut.contiguous(), whole.shape)


def copy_of(view: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    into = torch.full(view.shape, -1.0, device=device)
    into.copy_(view)
    return into


def check(cut: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Holding | None:
    """Checks that a cut, recorded and replayed, equals that of a real tensor. Returns what it
    wanted."""
    whole = numbered(*shape)
    holding = wanted(lambda window: copy_of(cut(window), "meta"), *shape)
    expected = cut(whole)
    if expected.numel() == 0:
        assert holding is None
        return None
    assert holding is not None
    assert torch.equal(copy_of(cut(staged(whole, holding))), expected)
    return holding


@pytest.mark.parametrize(
    ("cut", "offset", "shape"),
    [
        (lambda w: w, (0, 0), (8, 6)),
        (lambda w: w.narrow(0, 4, 4), (4, 0), (4, 6)),
        (lambda w: w.narrow(1, 3, 3), (0, 3), (8, 3)),
        (lambda w: w[2:6, 1:3].t(), (2, 1), (4, 2)),
        (lambda w: w.chunk(2, dim=1)[1].contiguous(), (0, 3), (8, 3)),
        (lambda w: w[::3], (0, 0), (7, 6)),
        (lambda w: w.reshape(2, 4, 6)[1, 2:], (6, 0), (2, 6)),
        (lambda w: w.flatten()[9:11], (1, 3), (1, 2)),
        (lambda w: w.flatten()[9:15], (1, 0), (2, 6)),
        (lambda w: w[3].unsqueeze(0).expand(4, 6), (3, 0), (1, 6)),
        (lambda w: w.narrow(0, 2, 2).to(torch.float64).float(), (2, 0), (2, 6)),
        (lambda w: w.narrow(0, 2, 2) * 2 + w.narrow(0, 5, 2), (2, 0), (5, 6)),
        (lambda w: w.diagonal(), (0, 0), (6, 6)),
        (lambda w: torch.cat([w[:1], w[2:3]]), (0, 0), (3, 6)),
        (lambda w: w.data.detach()[1:2], (1, 0), (1, 6)),
    ],
)
def test_what_a_cut_wants(cut: Any, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    holding = check(cut, 8, 6)
    assert holding is not None
    assert (holding.whole, holding.offset, holding.shape) == ((8, 6), offset, shape)
    assert holding.dtype == "float32"


def test_a_scalar_is_one_element() -> None:
    holding = check(lambda window: window.reshape(1))
    assert holding is not None
    assert (holding.whole, holding.offset, holding.shape) == ((1,), (0,), (1,))


def test_what_is_not_read_is_not_wanted() -> None:
    assert wanted(lambda window: window.narrow(0, 2, 2).t().shape, 8, 6) is None
    assert check(lambda window: window[3:3], 8, 6) is None


def test_recording_moves_nothing() -> None:
    into = torch.zeros(2, 6)

    def read(window: torch.Tensor) -> None:
        assert into.copy_(window[:2]) is into

    assert wanted(read, 8, 6)
    assert not into.any()


def test_shapes_that_do_not_fit_are_refused_while_recording() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        wanted(lambda window: torch.zeros(3, 6).copy_(window[:2]), 8, 6)


def test_a_replayed_view_is_no_copy() -> None:
    holding = Holding(NAME, "float32", (8, 6), (2, 3), (4, 3))
    memory = torch.zeros(4, 3)
    window = window_over(holding, memory)
    memory[1, 2] = 7.0
    assert window[3, 5].item() == 7.0


def test_what_was_not_staged_is_refused_by_name() -> None:
    holding = Holding(NAME, "float32", (8, 6), (2, 3), (4, 3))
    window = window_over(holding, torch.zeros(4, 3))
    with pytest.raises(WeightsMismatch) as refused:
        copy_of(window[1:4, 3:])
    assert f"{NAME}[1:4, 3:6] is read" in str(refused.value)
    assert f"{NAME}[2:6, 3:6] was staged" in str(refused.value)


def test_another_box_or_dtype_than_wanted_is_refused() -> None:
    holding = Holding(NAME, "float32", (8, 6), (2, 3), (4, 3))
    for memory in (torch.zeros(4, 4), torch.zeros(4, 3, dtype=torch.bfloat16)):
        with pytest.raises(InvalidArgument, match=NAME):
            window_over(holding, memory)


def test_a_loader_that_looks_at_values_is_refused_while_recording() -> None:
    for look in (lambda w: w[0, 0].item(), lambda w: w.nonzero(), lambda w: w[w > 3]):
        with pytest.raises(WeightsMismatch, match=NAME):
            wanted(look, 8, 6)


def test_values_without_their_scales_are_refused_while_recording() -> None:
    for dtype in (torch.float8_e4m3fn, torch.int8):
        wide, narrow = torch.empty(4, 2, device="meta"), torch.empty(4, 2, dtype=dtype)
        window = Wants().window("router.weight", dtype, (8, 2))
        with pytest.raises(WeightsMismatch, match=r"router\.weight is sent in .*without scales"):
            wide.copy_(window.narrow(0, 4, 4))
        narrow.to("meta").copy_(window.narrow(0, 4, 4))
        Wants().window("a.weight_scale", torch.float32, (1,))


def test_a_window_is_read_only() -> None:
    holding = Holding(NAME, "float32", (8, 6), (0, 0), (8, 6))
    memory = numbered(8, 6)
    for window in (window_over(holding, memory), Wants().window(NAME, torch.float32, (8, 6))):
        for write in (lambda w: w.mul_(2), lambda w: w[1].zero_(), lambda w: w.copy_(memory)):
            with pytest.raises(InvalidArgument, match=NAME):
                write(window)
    assert torch.equal(memory, numbered(8, 6))


def test_a_name_given_twice_is_refused() -> None:
    wants = Wants()
    wants.window(NAME, torch.float32, (2,))
    with pytest.raises(InvalidArgument, match=NAME):
        wants.window(NAME, torch.float32, (2,))


def test_a_view_of_another_dtype_wants_what_it_is_cut_from() -> None:
    holding = check(lambda window: window[2:4].view(torch.int32)[:1].view(torch.float32), 8, 6)
    assert holding is not None
    assert (holding.offset, holding.shape) == ((2, 0), (2, 6))


Op = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def operation(draw: st.DrawFn, tensor: torch.Tensor) -> Op:
    """Draws an operation that a loader may do with such a tensor."""
    kinds = ["unsqueeze", "detach", "flatten", "clone", "contiguous"]
    if tensor.dim():
        kinds += ["slice", "narrow", "select", "chunk", "split", "squeeze", "unflatten", "stride"]
        kinds += ["permute", "transpose", "expand", "reshape"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, max(0, tensor.dim() - 1)))
    size = tensor.shape[dim] if tensor.dim() else 1
    first = draw(st.integers(0, max(0, size - 1)))
    length = draw(st.integers(0 if size == 0 else 1, max(0, size - first)))
    parts = draw(st.integers(1, 3))
    order = draw(st.permutations(range(tensor.dim())))
    divisors = [each for each in range(1, size + 1) if size % each == 0] or [1]
    divisor = draw(st.sampled_from(divisors))
    match kind:
        case "slice":
            cut = (slice(None),) * dim + (slice(first, first + length),)
            return lambda t: t[cut]
        case "stride":
            strided = (slice(None),) * dim + (slice(first, None, parts),)
            return lambda t: t[strided]
        case "narrow":
            return lambda t: t.narrow(dim, first, length)
        case "select" if size:
            return lambda t: t.select(dim, first)
        case "chunk":
            return lambda t: t.chunk(parts, dim)[-1]
        case "split":
            return lambda t: t.split(max(1, length), dim)[0]
        case "squeeze":
            return lambda t: t.squeeze(dim)
        case "unflatten" if size:
            return lambda t: t.unflatten(dim, (divisor, -1))
        case "permute":
            return lambda t: t.permute(order)
        case "transpose":
            return lambda t: t.transpose(dim, tensor.dim() - 1)
        case "expand":
            return lambda t: t.unsqueeze(0).expand(parts, *t.shape)
        case "reshape" if size:
            return lambda t: t.reshape(
                *t.shape[:dim], size // divisor, divisor, *t.shape[dim + 1 :]
            )
        case "unsqueeze":
            return lambda t: t.unsqueeze(-1)
        case "flatten":
            return lambda t: t.flatten()
        case "clone":
            return lambda t: t.clone()
        case "contiguous":
            return lambda t: t.contiguous()
        case _:
            return lambda t: t.detach()


@settings(max_examples=1000, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), max_size=4))
def test_random_cuts_give_what_the_real_tensor_gives(data: st.DataObject, shape: list[int]) -> None:
    chain: list[Op] = []
    tensor = numbered(*shape)
    for _ in range(data.draw(st.integers(0, 6))):
        if tensor.dim() > 6 or tensor.numel() > 10_000:
            break
        chain.append(data.draw(operation(tensor)))
        tensor = chain[-1](tensor)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        for op in chain:
            whole = op(whole)
        return whole

    holding = wanted(lambda window: copy_of(cut(window), "meta"), *shape)
    whole = numbered(*shape)
    if holding is None:
        assert tensor.numel() == 0
        return
    assert torch.equal(copy_of(cut(staged(whole, holding))), tensor)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_a_cut_by_slices_wants_exactly_its_box(data: st.DataObject, shape: list[int]) -> None:
    slices = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        slices.append(slice(first, data.draw(st.integers(first + 1, size))))
    holding = check(lambda window: window[tuple(slices)].permute(*range(len(shape))), *shape)
    assert holding is not None
    assert holding.offset == tuple(each.start for each in slices)
    assert holding.shape == tuple(each.stop - each.start for each in slices)
