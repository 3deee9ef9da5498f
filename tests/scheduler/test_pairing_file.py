"""The pairing file: what it sets, and the errors of invalid ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.instances import Instance
from kvxfer.scheduler import pairing_file
from kvxfer.scheduler.pairing_file import read_pairing_file
from kvxfer.scheduler.scoring import Scorer, WeightedScorer, Weights


class Constant(Scorer):
    def __init__(self, cost: float = 1.0) -> None:
        self.cost = cost

    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        return {"constant": self.cost}

    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        return {}


@pytest.fixture
def installed(monkeypatch):
    """Two packages with scorers, as importlib would find them."""
    found = EntryPoints(
        EntryPoint(name, target, pairing_file.ENTRY_POINTS)
        for name, target in (("constant", f"{__name__}:Constant"), ("number", "builtins:int"))
    )
    monkeypatch.setattr(pairing_file, "entry_points", lambda group: found.select(group=group))


def test_weights_are_those_of_the_file(tmp_path):
    file = tmp_path / "pairing.yaml"
    file.write_text("weights:\n  distance: 2.5\n  occupancy: 3\n")
    scorer = read_pairing_file(file).scorer
    assert isinstance(scorer, WeightedScorer)
    assert scorer.weights == Weights(distance=2.5, occupancy=3)


def test_empty_file_is_the_default(tmp_path):
    file = tmp_path / "pairing.yaml"
    file.write_text("")
    scorer = read_pairing_file(file).scorer
    assert isinstance(scorer, WeightedScorer)
    assert scorer.weights == Weights()


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("alone_tokens = 128\n", 128)])
def test_alone_tokens_are_the_scorers(tmp_path, text, tokens):
    file = tmp_path / "pairing.toml"
    file.write_text(text + "[weights]\nprefix = 1.0\n")
    assert read_pairing_file(file).scorer.alone_tokens == tokens


def test_installed_scorer_keeps_its_own_alone_tokens(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(Constant, "alone_tokens", 7)
    file = tmp_path / "pairing.toml"
    for text, tokens in (("", 7), ("alone_tokens = 9\n", 9)):
        file.write_text(text + 'scorer = "constant"\n')
        assert read_pairing_file(file).scorer.alone_tokens == tokens


def test_tenants_have_their_weights(tmp_path):
    file = tmp_path / "pairing.toml"
    file.write_text("[tenants]\ngold = 2.0\niron = 1\n")
    assert read_pairing_file(file).tenants == {"gold": 2.0, "iron": 1.0}
    file.write_text("[tenants]\ngold = 0\n")
    with pytest.raises(InvalidArgument, match=r"tenants.*gold"):
        read_pairing_file(file)


def test_installed_scorer_is_made_with_its_options(tmp_path, installed):
    file = tmp_path / "pairing.toml"
    file.write_text('scorer = "constant"\n[options]\ncost = 4\n')
    scorer = read_pairing_file(file).scorer
    assert isinstance(scorer, Constant)
    assert scorer.cost == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weights = 3", r"weights is 3: expected `object`"),
        ("[weights]\nnear = 3", r"weights.near is not known; docs/pairing.md lists what is"),
        ("[weights]\ndistance = -1", r"distance is -1.0; write 0 to 1000000"),
        ('[weights]\ndistance = "far"', r"weights.distance is 'far': expected `float`"),
        ('scorer = "best"', r"'best', which no installed .* choose one of constant, number, weigh"),
        ('scorer = "constant"\n[weights]\nfabric = 2', r"weights are those of .* write options"),
        ('scorer = "constant"\n[options]\nprice = 2', r"'constant' cannot be made .*'price': 2"),
        ('scorer = "number"', r"'number' gave a int; it has to be a kvxfer.*Scorer"),
        ("[options]\ncost = 2", r"options is {'cost': 2}, but .*'weighted' has none"),
        ("weights", r"pairing.toml is not TOML"),
    ],
)
def test_invalid_file_is_refused_by_the_member(tmp_path, installed, text, said):
    file = tmp_path / "pairing.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=said) as refusal:
        read_pairing_file(file)
    assert "pairing.toml" in str(refusal.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"the pairing policy .*nothing.toml cannot be read"):
        read_pairing_file(tmp_path / "nothing.toml")
