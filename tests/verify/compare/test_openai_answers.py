"""Answers are compared by all that matters, and by nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .openai_answers import (
    DONE,
    ERROR,
    USAGE,
    delta,
    event,
    found,
    likely,
    paths,
    piece,
    streamed,
    whole,
)

# Equal streams, and different ones.


@st.composite
def cut_apart(draw: st.DrawFn) -> httpx2.Response:
    """Draws two samples of three tokens each, in deltas that end anywhere and come in any order."""
    left = {index: ["north", " glass", " 7"] for index in (0, 1)}
    events = []
    while any(left.values()):
        index = draw(st.sampled_from([index for index, tokens in left.items() if tokens]))
        taken = draw(st.integers(1, len(left[index])))
        tokens, left[index] = left[index][:taken], left[index][taken:]
        said = {
            "token_ids": [len(token) for token in tokens],
            "logprobs": likely(**dict.fromkeys(tokens, -0.5)),
            "finish_reason": None if left[index] else "length",
        }
        events.append(event(piece("".join(tokens), index, **said)))
    return streamed(*events, event(usage=USAGE), DONE)


@given(cut_apart(), cut_apart())
def test_streams_whose_deltas_are_cut_differently_are_equal(
    ours: httpx2.Response, theirs: httpx2.Response
) -> None:
    assert found(ours, theirs) == []


def test_reasoning_and_content_are_each_joined() -> None:
    theirs = [delta(role="assistant", content=""), delta(reasoning="why"), delta(content="this")]
    ours = [
        *(delta(role="assistant", content=""), delta(reasoning="w"), delta(reasoning="hy")),
        *(delta(content="th"), delta(content="is")),
    ]
    assert found(streamed(*ours), streamed(*theirs)) == []
    ours[3] = delta(reasoning="th")
    assert found(streamed(*ours), streamed(*theirs)) == [
        "choices.0.delta.content: 'is', not 'this'",
        "choices.0.delta.reasoning: 'whyth', not 'why'",
    ]


COMPLETION: Final = (
    event(piece("north", token_ids=[5], prompt_token_ids=[1, 2])),
    event(piece(" glass", token_ids=[6], prompt_token_ids=None)),
    event(piece(" 7", token_ids=[2], finish_reason="length", stop_reason=None)),
    event(usage=USAGE),
    DONE,
)


Change = Callable[[list[Any]], object]


def of_choice(chunk: int, **more: Any) -> Change:
    return lambda events: events[chunk]["choices"][0].update(more)


CHANGES: Final[dict[str, tuple[Change, set[str]]]] = {
    "a lost delta": (
        lambda events: events.pop(1),
        {"choices.0.text", "choices.0.token_ids", "choices.0.token_ids.1"},
    ),
    "a delta twice": (
        lambda events: events.insert(1, events[1]),
        {"choices.0.text", "choices.0.token_ids", "choices.0.token_ids.2"},
    ),
    "a changed token": (of_choice(1, text=" grass"), {"choices.0.text"}),
    "the id of a token": (of_choice(1, token_ids=[7]), {"choices.0.token_ids.1"}),
    "the id of a token of the prompt": (
        of_choice(0, prompt_token_ids=[1, 3]),
        {"choices.0.prompt_token_ids.1"},
    ),
    "another reason to end": (of_choice(2, finish_reason="stop"), {"choices.0.finish_reason"}),
    "a member less of a choice": (
        lambda events: events[2]["choices"][0].pop("stop_reason"),
        {"choices.0.stop_reason"},
    ),
    "a member more of a chunk": (
        lambda events: events[0].update(system_fingerprint=None),
        {"system_fingerprint"},
    ),
    "one more token in the usage": (
        lambda events: events[3].update(usage={**USAGE, "total_tokens": 13}),
        {"usage.total_tokens"},
    ),
    "no usage in its chunk": (lambda events: events[3].pop("usage"), {"usage"}),
    "no chunk with the usage": (lambda events: events.pop(3), {"usage"}),
    "another object": (lambda events: events[3].update(object="completion"), {"object"}),
    "no event at the end": (lambda events: events.pop(), {"others"}),
    "an error": (
        lambda events: events.insert(3, {"error": {"message": "lost"}}),
        {"others", "others.0"},
    ),
    "another choice": (lambda events: events.insert(1, event(piece("x", 1))), {"choices"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stream_that_differs_is_found_with_its_place(name: str) -> None:
    change, places = CHANGES[name]
    events = json.loads(json.dumps(COMPLETION))
    change(events)
    assert paths(streamed(*events), streamed(*COMPLETION)) == places
    assert paths(streamed(*COMPLETION), streamed(*events)) == places


def test_a_stream_that_has_no_logprobs_lacks_a_member() -> None:
    theirs = [event(piece("north")), event(piece(" glass"))]
    ours = json.loads(json.dumps(theirs))
    for chunk in ours:
        del chunk["choices"][0]["logprobs"]
    where = found(streamed(*ours), streamed(*theirs))
    assert where[0] == "choices.0.logprobs: missing"
    assert "members: 8 entries, not 9" in where


def test_a_stream_that_breaks_off_is_found() -> None:
    theirs = streamed(*COMPLETION)
    assert found(streamed(*COMPLETION, cut=1), theirs) == [
        "ended: False, not True",
        "others: 0 entries, not 1",
    ]
    assert found(streamed(*TYPED, cut=1), streamed(*TYPED)) == [
        "ended: False, not True",
        "events: 3 entries, not 4",
    ]
    assert paths(whole(COMPLETION[0]), theirs) >= {"content-type", "others", "ended"}


def test_missing_members_are_distinguished_from_added_ones() -> None:
    less, more = whole({"usage": {"a": 1}}), whole({"usage": {"a": 1, "b": None}})
    assert found(less, more) == ["usage.b: missing"]
    assert found(more, less) == ["usage.b: extra"]


# Tool calls.


def called(index: int, **function: str) -> dict[str, Any]:
    return {"index": index, "function": function}


def test_deltas_of_a_tool_call_are_joined_by_its_index() -> None:
    first = {**called(0, name="look", arguments=""), "id": "chatcmpl-tool-1f", "type": "function"}
    second = {**called(1, name="go", arguments='{"b'), "id": "chatcmpl-tool-2e", "type": "function"}
    theirs = streamed(
        delta(tool_calls=[first]),
        delta(tool_calls=[called(0, arguments='{"a": 1}')]),
        delta(tool_calls=[second]),
        delta(tool_calls=[called(1, arguments='": 2}')]),
        delta(finish_reason="tool_calls"),
    )

    def ours(*, end: str = '": 2}', of: int = 1, name: str = "go") -> httpx2.Response:
        renamed = {**second, "function": {"name": name, "arguments": ""}}
        return streamed(
            delta(tool_calls=[first, called(0, arguments='{"a"')]),
            delta(tool_calls=[called(0, arguments=": 1}"), renamed]),
            delta(tool_calls=[called(1, arguments='{"b'), called(of, arguments=end)]),
            delta(finish_reason="tool_calls"),
        )

    assert found(ours(), theirs) == []
    calls = "choices.0.delta.tool_calls"
    assert paths(ours(end='": 3}'), theirs) == {f"{calls}.1.function.arguments"}
    assert paths(ours(name="run"), theirs) == {f"{calls}.1.function.name"}
    both = {f"{calls}.{index}.function.arguments" for index in (0, 1)}
    assert paths(ours(of=0), theirs) == both
    assert paths(ours(of=2), theirs) == {calls, f"{calls}.1.function.arguments"}


# Events with a type: /v1/responses and /v1/messages.


def said(text: str, **more: Any) -> tuple[str, Any]:
    name = "response.output_text.delta"
    data = {"type": name, "item_id": "msg_1f", "output_index": 0, "delta": text, "logprobs": []}
    return name, {**data, **more}


def response(status: str, **more: Any) -> tuple[str, Any]:
    told = {"id": "resp_1f", "created_at": 17, "status": status, **more}
    name = f"response.{status}"
    return name, {"type": name, "sequence_number": 0, "response": told}


TYPED: Final = (
    response("created"),
    said("north"),
    said(" glass"),
    ("response.output_text.done", {"item_id": "msg_1f", "text": "north glass"}),
    response("completed", usage={"input_tokens": 9, "output_tokens": 2}),
)


def test_typed_events_are_equal_however_their_deltas_are_cut() -> None:
    theirs = streamed(*TYPED)
    cut = [said(text) for text in ("no", "rth ", "gl", "ass")]
    assert found(streamed(TYPED[0], *cut, *TYPED[3:]), theirs) == []
    assert found(streamed(TYPED[0], said("north glass"), *TYPED[3:]), theirs) == []


@pytest.mark.parametrize(
    ("ours", "places"),
    [
        ((*TYPED[:2], *TYPED[3:]), {"events.1.1.delta"}),
        ((*TYPED[:2], said(" grass"), *TYPED[3:]), {"events.1.1.delta"}),
        ((TYPED[0], said("north glass", output_index=1), *TYPED[3:]), {"events.1.1.output_index"}),
        ((*TYPED[:4], response("completed")), {"events.3.1.response.usage"}),
        ((*TYPED[:3], TYPED[4], TYPED[3]), {"events.2.0", "events.3.0"}),
        (TYPED[:4], {"events"}),
    ],
)
def test_typed_events_that_differ_are_found(ours: tuple[Any, ...], places: set[str]) -> None:
    assert paths(streamed(*ours), streamed(*TYPED)) >= places


def block(text: str, index: int = 0, kind: str = "text") -> tuple[str, Any]:
    told = {"type": f"{kind}_delta", kind: text}
    return ("content_block_delta", {"index": index, "delta": told})


ENDED = ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((block("a"), block("b", 1)), (block("a"), block("b"))),
        ((block("a", kind="thinking"), block("b")), (block("a", kind="thinking"),)),
        ((said("a"), said("b", more=1)), (said("a"), said("b"))),
        ((said("a"), ("response.output_text.delta", "b")), (said("a"),)),
        ((ENDED, ENDED), (ENDED,)),
        ((delta(finish_reason="stop"), delta(content="a")), (delta(0, "stop", content="a"),)),
        ((DONE, delta(content="a")), (delta(content="a"), DONE)),
        ((event(model="x"), event()), (event(), event())),
        ((delta(0, "stop"), delta(0, "length")), (delta(0, "length"),)),
        (({"choices": [{"text": "a"}]},), ({"choices": [{"text": "a", "index": 0}]},)),
        (({"choices": None},), ({"choices": []},)),
    ],
)
def test_only_the_text_of_neighbours_is_joined(
    ours: tuple[Any, ...], theirs: tuple[Any, ...]
) -> None:
    assert found(streamed(*ours), streamed(*theirs))


def test_models_are_matched_by_their_names() -> None:
    one, other = (
        whole({"object": "list", "data": [{"id": name, "object": "model"}]})
        for name in ("tiny", "blue")
    )
    assert paths(one, other) == {"names.0"}


def test_blocks_of_a_message_are_each_joined() -> None:
    def block(index: int, **said: str) -> tuple[str, Any]:
        return "content_block_delta", {"index": index, "delta": said}

    def stop(index: int) -> tuple[str, Any]:
        return "content_block_stop", {"index": index}

    theirs = [
        block(0, type="thinking_delta", thinking="why"),
        *(stop(0), block(1, type="text_delta", text="this"), stop(1)),
        *(block(2, type="input_json_delta", partial_json='{"a": 1}'), stop(2)),
    ]
    ours = [
        block(0, type="thinking_delta", thinking="w"),
        block(0, type="thinking_delta", thinking="hy"),
        *(stop(0), block(1, type="text_delta", text="th")),
        *(block(1, type="text_delta", text="is"), stop(1)),
        block(2, type="input_json_delta", partial_json='{"a'),
        *(block(2, type="input_json_delta", partial_json='": 1}'), stop(2)),
    ]
    assert found(streamed(*ours), streamed(*theirs)) == []
    for lost, place in (
        (1, "events.0.1.delta.thinking"),
        (4, "events.2.1.delta.text"),
        (7, "events.4.1.delta.partial_json"),
    ):
        left = [each for at, each in enumerate(ours) if at != lost]
        assert paths(streamed(*left), streamed(*theirs)) == {place}


# Answers in one piece.


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (whole({"error": ERROR}, 422, retry_after="3"), ["status: 422, not 400"]),
        (whole({"error": ERROR}, 400, retry_after="4"), ["retry-after: '4', not '3'"]),
        (whole({"error": ERROR}, 400), ["retry-after: None, not '3'"]),
        (
            whole({"error": ERROR}, 400, retry_after="3", www_authenticate="Bearer"),
            ["www-authenticate: 'Bearer', not None"],
        ),
        (
            whole({"error": {**ERROR, "message": "too Long"}}, 400, retry_after="3"),
            ["error.message: 'too Long', not 'too long'"],
        ),
        (
            whole({"error": {**ERROR, "param": None}}, 400, retry_after="3"),
            ["error.param: None, not 'prompt'"],
        ),
        (
            whole({"error": {**ERROR, "code": "400"}}, 400, retry_after="3"),
            ["error.code: '400', not 400"],
        ),
        (whole({"error": [ERROR]}, 400, retry_after="3"), [f"error: [{ERROR!r}], not {ERROR!r}"]),
    ],
)
def test_a_refusal_that_differs_is_found_with_its_place(
    ours: httpx2.Response, expected: list[str]
) -> None:
    assert found(ours, whole({"error": ERROR}, 400, retry_after="3")) == expected


def test_an_answer_that_is_not_json_is_compared_as_text() -> None:
    theirs = httpx2.Response(500, text="Internal Server Error")
    assert found(httpx2.Response(500, text="Internal Server Error"), theirs) == []
    assert found(httpx2.Response(500, text="internal error"), theirs) == [
        ": 'internal error', not 'Internal Server Error'"
    ]


def test_logprobs_are_equal_within_a_thousandth() -> None:
    theirs = whole({"logprobs": [-1.0, -0.25]})
    assert found(whole({"logprobs": [-1.0009, -0.2491]}), theirs) == []
    assert found(whole({"logprobs": [-1.0011, -0.2489]}), theirs) == [
        "logprobs.0: -1.0011, not -1.0",
        "logprobs.1: -0.2489, not -0.25",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (1, True),
        (0, False),
        (1, 2),
        (0, None),
        ("1", 1),
        ("1.0", 1.0),
        (None, 1.0),
        ([], {}),
        ("", []),
    ],
)
def test_values_of_other_types_are_not_equal(ours: Any, theirs: Any) -> None:
    assert len(found(whole({"a": ours}), whole({"a": theirs}))) == 1
    assert len(found(whole({"a": theirs}), whole({"a": ours}))) == 1


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("id", "cmpl-5a1f", "cmpl-0e77"),
        ("id", "chatcmpl-tool-5a1f", "chatcmpl-tool-0e77"),
        ("call_id", "call_5a1f", "call_0e77"),
        ("item_id", "msg_5a1f", "msg_0e77"),
        ("system_fingerprint", "vllm-0.32.0-5a1f", "vllm-0.32.1-0e77"),
        ("signature", "5a1f", "0e77"),
        ("created", 1764000000, 1764000001),
        ("created_at", 1764000000.5, 1764000001.25),
        ("sequence_number", 3, 4),
    ],
)
def test_ids_and_times_are_equal_by_their_form(name: str, ours: Any, theirs: Any) -> None:
    assert found(whole({name: ours}), whole({name: theirs})) == []
    assert found(whole({name: None}), whole({name: theirs})) != []
    assert found(whole({name: ours}), whole({f"other_{name}": ours})) != []
    assert found(whole({f"other_{name}": ours}), whole({f"other_{name}": theirs})) != []


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("id", "chatcmpl-5a1f", "cmpl-5a1f"),
        ("id", "chatcmpl-5a1f", "chatcmpl-tool-5a1f"),
        ("id", "5a1f", "cmpl-5a1f"),
        ("id", "", "cmpl-5a1f"),
        ("id", "cmpl-5a 1f", "cmpl-5a1f"),
        ("id", 7, "cmpl-5a1f"),
        ("item_id", "rs_5a1f", "msg_5a1f"),
        ("call_id", "call_xyz!", "call_5a1f"),
        ("system_fingerprint", "kvxfer-5a1f", "vllm-0.32.0-5a1f"),
        ("signature", "xyz", "5a1f"),
        ("created", "1764000000", 1764000000),
    ],
)
def test_an_id_of_another_form_is_found(name: str, ours: Any, theirs: Any) -> None:
    assert paths(whole({name: ours}), whole({name: theirs})) == {name}


def test_the_forbidden_tokens_that_fill_a_list_do_not_count() -> None:
    def completion(**top: float) -> httpx2.Response:
        return whole({"logprobs": {"top_logprobs": [None, top]}})

    theirs = completion(a=-0.5, b=-9999.0, c=-9999.0)
    assert found(completion(a=-0.5, d=-9999.0, e=-9999.0), theirs) == []
    place = "logprobs.top_logprobs.1"
    assert paths(completion(a=-0.5, d=-9999.0), theirs) == {f"{place}.forbidden"}
    assert paths(completion(a=-0.5, b=-9000.0, c=-9999.0), theirs) == {
        f"{place}.b",
        f"{place}.forbidden",
    }
    assert paths(completion(d=-0.5, b=-9999.0, c=-9999.0), theirs) == {f"{place}.a", f"{place}.d"}


def test_the_forbidden_tokens_that_fill_a_list_of_a_chat_do_not_count() -> None:
    def chat(**top: float) -> httpx2.Response:
        entries = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
        return whole({"content": [{"token": "a", "top_logprobs": entries}]})

    theirs = chat(a=-0.5, b=-9999.0)
    assert found(chat(a=-0.5, d=-9999.0), theirs) == []
    place = "content.0.top_logprobs"
    assert paths(chat(a=-0.5), theirs) == {place}
    assert paths(chat(d=-0.5, b=-9999.0), theirs) == {f"{place}.0.token"}
    assert paths(chat(a=-0.5, b=-9000.0), theirs) == {f"{place}.1.logprob", f"{place}.1.token"}
