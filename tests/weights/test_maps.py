"""Maps as records and as JSON, and the errors for wrong ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.weights.document import as_document, parse_map, read_map
from kvxfer.weights.maps import Parameters
from kvxfer.weights.models import MODELS, model_map
from kvxfer.weights.plan.schedule import plan_weights


def document(**parameters: Any) -> dict[str, Any]:
    """A map whose training side has one parameter, with these members added or replaced."""
    of_it = {"name": "w", "shape": [8, 4], "dtype": "bfloat16"}
    return {
        "train": {"mesh": {"dp": 4}, "parameters": [{**of_it, **parameters}]},
        "infer": {"mesh": {"tp": 2}, "parameters": [{**of_it, "split": [["tp"], []]}]},
    }


def parse(value: dict[str, Any]) -> None:
    parse_map(json.dumps(value).encode(), "my.json")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"dtype": "bf16"}, "dtype of w is 'bf16'; use one of float32,"),
        ({"name": "w.{layer}"}, r"each of w.{layer} is []; the name has the indices ['layer']"),
        ({"name": "w.{i}", "each": {"i": [3, 3]}}, "each.i of w.{i} is (3, 3); write the first"),
        ({"owner": {"expert": ["dp"]}}, "owner of w is 'expert'; use an index of []"),
        ({"split": [["dp"]]}, "write one for each of 2 dimensions"),
        ({"split": [["tp"], []]}, "w uses the axis 'tp'; mesh has dp"),
        ({"split": [["dp"], ["dp"]]}, "axis of w is 'dp'; name it once"),
        ({"only": {"dp": 4}}, "only.dp of w is 4; use less than 4"),
        ({"padding": [8, 0]}, "padding of w is (8, 0); leave some elements of (8, 4)"),
        ({"parts": [{"ranks": [0], "offset": [4, 0], "shape": [5, 4]}]}, "stay inside the shape"),
        ({"parts": [{"ranks": [4], "offset": [0, 0], "shape": [8, 4]}]}, "name rank 4; use less"),
        ({"parts": [{"ranks": [0, 0], "offset": [0, 0], "shape": [8, 4]}]}, "one box at most"),
        ({"parts": [{"ranks": [0], "offset": [0], "shape": [8, 4]}]}, "shape of 2 dimensions"),
        (
            {"parts": [{"ranks": [0], "offset": [0, 0], "shape": [8, 4]}], "only": {"dp": 0}},
            "leave split, owner and only out",
        ),
        ({"shape": []}, "Expected `array` of length"),
        ({"shape": [8, 0]}, "Expected `int` >= 1 - at `$.train.parameters[0].shape[1]`"),
        ({"sharding": "fsdp"}, "unknown field `sharding` - at `$.train.parameters[0]`"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_parameter(
    parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)) as refused:
        parse(document(**parameters))
    assert str(refused.value).startswith("my.json: ")


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ({"hosts": ["a"]}, "hosts has 1 names; write one for each of 4 ranks"),
        ({"zones": ["a"]}, "zones has 1 names; write one for each of 4 ranks"),
        ({"mesh": {"d p": 4}}, "mesh has the axis 'd p'; use letters"),
        ({"mesh": {"a": 4096, "b": 4096}}, "mesh has 16777216 ranks"),
        ({"mesh": {}}, "Expected `object` of length >= 1"),
        ({"tied": {"v": "u"}}, "tied.v is 'u'; name a parameter of this side"),
        ({"tied": {"w": "w"}}, "tied.w is 'w'; name a parameter of this side that is not tied"),
        ({"nics": 0}, "Expected `int` >= 1 - at `$.train.nics`"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_side(side: dict[str, Any], words: str) -> None:
    wrong = document()
    wrong["train"] |= side
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        parse(wrong)


def test_a_parameter_described_twice_is_refused() -> None:
    wrong = document()
    wrong["train"]["parameters"] *= 2
    with pytest.raises(InvalidArgument, match="w is described twice"):
        parse(wrong)


def test_the_error_names_a_file_that_is_not_a_map(tmp_path) -> None:
    with pytest.raises(InvalidArgument, match=r"the weight map .*none.json cannot be read"):
        read_map(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"train": ')
    with pytest.raises(InvalidArgument, match=r"half.json: Input data was truncated"):
        read_map(tmp_path / "half.json")
    with pytest.raises(InvalidArgument, match="Invalid enum value 2"):
        parse({**document(), "version": 2})


def test_names_follow_the_indices() -> None:
    several = Parameters(
        name="l{layer}.e{expert}",
        shape=(1,),
        dtype="uint8",
        each={"layer": (1, 3), "expert": (0, 2)},
    )
    assert several.names() == ["l1.e0", "l1.e1", "l2.e0", "l2.e1"]


@pytest.mark.parametrize("model", MODELS)
def test_known_models_go_through_json(model: str) -> None:
    weights = model_map(model, 8, 4)
    assert parse_map(as_document(weights), model) == weights


def refused(train: dict[str, Any], infer: dict[str, Any]) -> str:
    """Returns the error of planning with these members of the parameter `w`, or of the sides."""
    value = document()
    for name, changes in (("train", train), ("infer", infer)):
        side = changes.pop("side", {})
        value[name]["parameters"][0] |= changes
        value[name] |= side
    weights = parse_map(json.dumps(value).encode(), "map")
    with pytest.raises(InvalidArgument) as error:
        plan_weights(weights)
    return str(error.value)


def test_the_error_names_what_no_rank_holds() -> None:
    assert "inference wants v, which no training rank holds" in refused({}, {"name": "v"})
    parts = [
        {"ranks": [0, 1], "offset": [0, 0], "shape": [5, 4]},
        {"ranks": [2], "offset": [2, 0], "shape": [5, 4]},
    ]
    assert "inference rank 1 wants [4:8, 0:4] of w" in refused({"parts": parts}, {})


def test_other_types_and_shapes_are_refused_by_name() -> None:
    said = refused({"dtype": "float32"}, {})
    assert "w is float32 at training and bfloat16 at inference; convert it" in said
    said = refused({}, {"shape": [10, 4], "padding": [1, 0]})
    assert "w is [8, 4] at training and [9, 4] at inference" in said
    assert "w is [8, 4] at training and [8] at inference" in refused(
        {}, {"shape": [8], "split": [["tp"]]}
    )


def test_tied_parameters_cannot_take_two_separate_ones() -> None:
    more = [
        {"name": "w", "shape": [8, 4], "dtype": "bfloat16"},
        {"name": "v", "shape": [8, 4], "dtype": "bfloat16"},
    ]
    said = refused({"side": {"parameters": more}}, {"side": {"tied": {"v": "w"}}})
    assert "v is tied to w at inference, and a separate parameter at training" in said


def test_parameters_that_inference_does_not_want_are_listed() -> None:
    value = document()
    value["train"]["parameters"].append({"name": "value_head", "shape": [4], "dtype": "float32"})
    schedule = plan_weights(parse_map(json.dumps(value).encode(), "map"))
    assert schedule.demands.unwanted == ("value_head",)
    assert schedule.figures.parameters == 1


def test_a_tied_parameter_is_sent_once() -> None:
    value = document()
    more = {"name": "v", "shape": [8, 4], "dtype": "bfloat16"}
    for side in ("train", "infer"):
        value[side]["parameters"].append(more)
        value[side]["tied"] = {"v": "w"}
    figures = plan_weights(parse_map(json.dumps(value).encode(), "map")).figures
    assert (figures.nbytes, figures.unwanted) == (8 * 4 * 2, 0)


def test_the_map_of_the_docs_is_valid() -> None:
    text = (Path(__file__).parents[2] / "docs/weight-maps.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    figures = plan_weights(parse_map(example.encode(), "docs/weight-maps.md")).figures
    embedding, experts = 32000 * 512 * 2, 12 * 16 * 512 * 1024 * 2
    assert figures.nbytes == 2 * embedding + experts  # two groups share the embedding
    assert figures.padding_bytes == 2 * 64 * 512 * 2
    assert (figures.parameters, figures.unwanted) == (1 + 12 * 16, 0)
