"""Parameters that move to other memory while they are trained: the current ones are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.quantize import FP8_BLOCKS
from kvxfer.weights.torch_state import TrainingState, state_of
from tests.weights.whole_quantization import quantized

pytestmark = pytest.mark.native


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.up = nn.Linear(4, 5)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))


def _reassign(net: Net) -> None:
    net.up.weight.data = torch.full((5, 4), 7.0)


def _offload(net: Net) -> None:
    """Frees the parameters' memory and restores it elsewhere, as trainers that keep one copy do."""
    kept = {name: each.data.clone() for name, each in net.named_parameters()}
    for name, each in net.named_parameters():
        each.data = torch.empty(0)
        each.data = kept[name] + 1


def _load(net: Net) -> None:
    other = {name: each.detach().clone() + 3 for name, each in net.state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    net.load_state_dict(other, assign=True)
    net.head.weight = net.embed.weight


def _replace(net: Net) -> None:
    net.up.weight = nn.Parameter(torch.full((5, 4), -1.0))
    net.scale = torch.tensor(5.0)


def _tied(net: Net) -> None:
    net.embed.weight.data = torch.full((6, 4), 9.0)


def _strided(net: Net) -> None:
    net.up.weight.data = torch.arange(20.0).view(4, 5).t()


def _regrown(net: Net) -> None:
    storage = net.up.weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    between = torch.ones(1000)  # often takes the freed memory
    storage.resize_(nbytes)
    with torch.no_grad():
        net.up.weight.fill_(float(between[0]))


MOVES = [_reassign, _offload, _load, _replace, _tied, _strided, _regrown]


def assert_sends(state: TrainingState, net: Net, sent: dict[str, torch.Tensor]) -> None:
    wanted = {name: each for name, each in net.state_dict().items() if name != "head.weight"}
    assert sent.keys() == wanted.keys()
    assert state.holdings.tied == {"head.weight": "embed.weight"}
    for name, each in wanted.items():
        assert torch.equal(sent[name], each.view(sent[name].shape).to(sent[name].dtype)), name
        assert sent[name].is_contiguous()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_follows_parameters_to_other_memory(
    move: Callable[[Net], None], dtype: str
) -> None:
    net = Net()
    state = state_of(net, sent_as=lambda *_: dtype)
    before = state.holdings
    for _ in range(2):
        move(net)
        assert_sends(state, net, state.staged())
        with torch.no_grad():
            net.up.weight.add_(1)
        assert_sends(state, net, state.staged())
    assert state.holdings == before


@pytest.mark.parametrize("move", MOVES)
def test_quantised_parameters_are_followed_too(move: Callable[[Net], None]) -> None:
    net = Net()
    state = state_of(net, quantize=lambda name, _: FP8_BLOCKS if name == "up.weight" else None)
    move(net)
    sent = state.staged()
    values, scales = quantized(net.up.weight.detach().contiguous(), FP8_BLOCKS)
    assert torch.equal(sent["up.weight"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(sent["up.weight_scale_inv"], scales)
    assert torch.equal(sent["embed.weight"], net.embed.weight)


def _shorter(net: Net) -> None:
    net.up.weight.data = torch.zeros(3, 4)


def _other_dtype(net: Net) -> None:
    net.up.weight.data = net.up.weight.data.half()


def _untied(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.zeros(6, 4))


def _gone(net: Net) -> None:
    del net.up.bias


def _new(net: Net) -> None:
    net.value = nn.Linear(4, 1, bias=False)


CHANGES: list[tuple[Callable[[Net], None], str]] = [
    (_shorter, r"up.weight was float32 of \[5, 4\], and is float32 of \[3, 4\]"),
    (_other_dtype, r"up.weight was float32 of \[5, 4\], and is float16 of \[5, 4\]"),
    (_untied, "head.weight was tied to embed.weight, and is not tied"),
    (_gone, r"up.bias was float32 of \[5\], and is absent"),
    (_new, r"value.weight was absent, and is float32 of \[1, 4\]"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_a_change_of_what_instances_planned_with_is_refused(
    change: Callable[[Net], None], text: str
) -> None:
    net = Net()
    state = state_of(net)
    change(net)
    for _ in range(2):
        with pytest.raises(WeightsMismatch, match=text + r".*forget\(model\).*new Trainer"):
            state.staged()


def test_memory_that_was_freed_is_refused_until_it_is_allocated_again() -> None:
    net = Net()
    state = state_of(net)
    storage = net.up.bias.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(InvalidArgument, match=r"up\.bias has no memory"):
        state.staged()
    storage.resize_(nbytes)
    with torch.no_grad():
        net.up.bias.fill_(4)
    assert state.staged()["up.bias"].tolist() == [4] * 5


def test_a_mapping_is_read_again_at_each_staging() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    parameters = {"a.weight": weight, "b.weight": torch.ones(2)}
    state = state_of(parameters)
    weight.data = torch.full((2, 2), 3.0)
    parameters["b.weight"] = torch.full((2,), 4.0)
    assert {name: each.flatten()[0].item() for name, each in state.staged().items()} == {
        "a.weight": 3,
        "b.weight": 4,
    }
    del parameters["b.weight"]
    with pytest.raises(WeightsMismatch, match=r"b\.weight was .* and is absent"):
        state.staged()


def test_memory_that_parameters_have_left_is_kept_until_the_next_staging() -> None:
    weight = nn.Parameter(torch.zeros(3))
    state = state_of({"a": weight})
    weight.data = torch.ones(3)
    assert state.tensors["a"].tolist() == [0, 0, 0]
    assert state.staged()["a"].tolist() == [1, 1, 1]
