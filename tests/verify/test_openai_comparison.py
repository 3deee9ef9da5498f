"""The comparison of `make test-openai` finds what differs, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.openai.answers import Where, read
from verify.openai.cases import Case
from verify.openai.comparison import (
    BROKEN_OFF,
    Tally,
    Way,
    can_be_pulled,
    compare,
    pulled,
    straight,
)
from verify.openai.excuses import Excuse, excusing, read_excuses
from verify.openai.members import CHAT, COMPLETIONS, ROUTES, Values, members_of
from verify.openai.pairs import PairCover

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE: Final = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
DONE: Final = "[DONE]"


def whole(content: Any, status: int = 200, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, json=content, headers=named)


def streamed(*events: Any, cut: int = 0) -> httpx2.Response:
    """A stream without the last `cut` bytes. An event with a type is a pair of it and its data."""
    lines = []
    for each in events:
        name, data = each if isinstance(each, tuple) else ("", each)
        text = data if isinstance(data, str) else json.dumps(data)
        lines.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    content = "".join(lines).encode()
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx2.Response(200, content=content[: len(content) - cut], headers=headers)


def found(ours: httpx2.Response, theirs: httpx2.Response) -> list[str]:
    return [str(where) for where in read(ours).differences(read(theirs))]


def paths(ours: httpx2.Response, theirs: httpx2.Response) -> set[str]:
    """Where they differ, without the list of the names of all members of a stream."""
    where = [each.path for each in read(ours).differences(read(theirs))]
    return {".".join(path) for path in where if path[:1] != ("members",)}


def event(*choices: Any, **more: Any) -> dict[str, Any]:
    said = {"id": "cmpl-5a1f", "object": "text_completion", "created": 17, "model": "tiny"}
    return {**said, "choices": list(choices), **more}


def piece(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def delta(index: int = 0, finish_reason: str | None = None, **said: Any) -> dict[str, Any]:
    return event({"index": index, "delta": said, "finish_reason": finish_reason})


def likely(**tokens: float) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "token_logprobs": list(tokens.values()),
        "top_logprobs": [{token: logprob} for token, logprob in tokens.items()],
    }


# Streams that are equal, and those that are not.


@st.composite
def cut_apart(draw: st.DrawFn) -> httpx2.Response:
    """Two samples of three tokens each, in deltas that end anywhere and come in any order."""
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
def test_streams_whose_deltas_are_cut_otherwise_are_equal(
    ours: httpx2.Response, theirs: httpx2.Response
) -> None:
    assert found(ours, theirs) == []


def test_reasoning_and_content_are_joined_each() -> None:
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


def test_what_is_missing_is_told_from_what_is_added() -> None:
    less, more = whole({"usage": {"a": 1}}), whole({"usage": {"a": 1, "b": None}})
    assert found(less, more) == ["usage.b: missing"]
    assert found(more, less) == ["usage.b: more than there"]


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


def test_models_are_known_by_their_names() -> None:
    one, other = (
        whole({"object": "list", "data": [{"id": name, "object": "model"}]})
        for name in ("tiny", "blue")
    )
    assert paths(one, other) == {"names.0"}


def test_blocks_of_a_message_are_joined_each() -> None:
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

ERROR: Final = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}


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


def test_an_answer_that_is_no_json_is_compared_as_text() -> None:
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


def test_which_forbidden_tokens_fill_a_list_does_not_count() -> None:
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


def test_which_forbidden_tokens_fill_a_list_of_a_chat_does_not_count() -> None:
    def chat(**top: float) -> httpx2.Response:
        entries = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
        return whole({"content": [{"token": "a", "top_logprobs": entries}]})

    theirs = chat(a=-0.5, b=-9999.0)
    assert found(chat(a=-0.5, d=-9999.0), theirs) == []
    place = "content.0.top_logprobs"
    assert paths(chat(a=-0.5), theirs) == {place}
    assert paths(chat(d=-0.5, b=-9999.0), theirs) == {f"{place}.0.token"}
    assert paths(chat(a=-0.5, b=-9000.0), theirs) == {f"{place}.1.logprob", f"{place}.1.token"}


# What docs/router.md excuses.

TABLE: Final = """
| a | table |
|---|---|
| of | others |

| route | member | condition | part | aggregated server | router |
|---|---|---|---|---|---|
| all | `kv_transfer_params` | not null | all | ignored | 400 |
| `/v1/completions` | `n` | over 1 | `usage` | of one | of all |

| another | table |
|---|---|
| all | `seed` |

| all | `seed` | not null | all | of a third | table |
"""
REFUSED: Final = Excuse("all", "kv_transfer_params", "not null", "all")
OF_USAGE: Final = Excuse(COMPLETIONS, "n", "over 1", "usage")


def test_excuses_are_the_rows_of_the_table(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE)
    assert read_excuses(document) == [REFUSED, OF_USAGE]


def test_a_condition_that_is_unknown_is_named(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE.replace("over 1", "often"))
    with pytest.raises(ValueError, match=r"router\.md.*'often'.*over 1"):
        read_excuses(document)


def test_a_document_without_the_table_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "router.md"
    document.write_text(TABLE.replace("condition", "case"))
    with pytest.raises(ValueError):
        read_excuses(document)


def test_the_document_of_the_router_excuses_something() -> None:
    assert read_excuses()


@pytest.mark.parametrize(
    ("condition", "holds", "does_not"),
    [
        ("not null", ({}, 0, False, ""), (None,)),
        ("of no worker", ("", "none-such"), ("tiny", "blue", 7, None)),
        ("not fit for a log", ("", "two lines\n", "r" * 200), ("req-7", 7, None)),
        ("over 1", (2, 1.5), (1, 0, True, "2", None)),
    ],
)
def test_a_row_is_about_values_that_meet_its_condition(
    condition: str, holds: tuple[Any, ...], does_not: tuple[Any, ...]
) -> None:
    excuse = Excuse("all", "a", condition, "all")
    assert [value for value in holds if not excuse.matches(CHAT, {"a": value})] == []
    assert [value for value in does_not if excuse.matches(CHAT, {"a": value})] == []


def test_a_row_is_about_its_route_and_member() -> None:
    assert OF_USAGE.matches(COMPLETIONS, {"n": 2})
    assert not OF_USAGE.matches(CHAT, {"n": 2})
    assert not OF_USAGE.matches(COMPLETIONS, {"best_of": 2})
    assert not OF_USAGE.matches(COMPLETIONS, b'{"n": 2}')
    assert REFUSED.matches(MESSAGES, {"kv_transfer_params": {}})


def test_a_row_excuses_only_its_part() -> None:
    usage = Where(("usage", "cached_tokens"), "3, not 4")
    text = Where(("choices", "0", "text"), "'a', not 'b'")
    case = Case("n", COMPLETIONS, ({"n": 2},))

    def excused(*where: Where, **more: Any) -> Excuse | None:
        return excusing([REFUSED, OF_USAGE], case, {"n": 2, **more}, where)

    assert excused(usage) is OF_USAGE
    assert excused(usage, text) is None
    assert excused(text) is None
    assert excused(Where(("status",), "500, not 200")) is None
    assert excused(usage, text, kv_transfer_params={}) is REFUSED


def test_only_a_row_of_the_whole_answer_is_a_refusal() -> None:
    assert REFUSED.refuses(CHAT, {"kv_transfer_params": {}})
    assert not REFUSED.refuses(CHAT, {"kv_transfer_params": None})
    assert not OF_USAGE.refuses(COMPLETIONS, {"n": 2})


# Bodies of many members.

Takes = Callable[[Collection[str]], bool]


def bodies_until_covered(cover: PairCover, takes: Takes) -> list[Collection[str]]:
    """What an engine is asked. Each body settles a pair, or has one that is tried alone later."""
    asked: list[Collection[str]] = []
    while cover.left and len(asked) < 2 * cover.total:
        asked.append(cover.next())
        cover.told(asked[-1], answered=takes(asked[-1]))
    assert not cover.left
    return asked


@st.composite
def groups_that_are_refused(draw: st.DrawFn) -> tuple[list[str], set[tuple[str, ...]]]:
    """Members, and those of them that no body may have together: two or three."""
    members = [f"m{index:02}" for index in range(draw(st.integers(2, 14)))]
    sizes = [list(itertools.combinations(members, size)) for size in (2, 3)]
    refused = {each for size in sizes if size for each in draw(st.sets(st.sampled_from(size)))}
    return members, refused


@given(groups_that_are_refused(), st.integers(0, 99))
def test_each_pair_is_answered_or_refused_as_the_engine_says(
    drawn: tuple[list[str], set[tuple[str, ...]]], seed: int
) -> None:
    members, groups = drawn
    cover = PairCover(members, random.Random(seed))
    bodies_until_covered(cover, lambda names: not any(set(group) <= set(names) for group in groups))
    refused = {group for group in groups if len(group) == 2}
    assert cover.refused == refused
    assert cover.answered == set(itertools.combinations(sorted(members), 2)) - refused


def test_pairs_that_are_all_valid_take_few_bodies(seed: int) -> None:
    cover = PairCover([f"m{index:02}" for index in range(24)], random.Random(seed))
    asked = bodies_until_covered(cover, lambda names: True)
    assert len(cover.answered) == cover.total == 24 * 23 // 2
    assert len(asked) <= 25


# Members by a document.


def openapi(**members: Any) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    return {
        "paths": {route: {"post": {"requestBody": {"content": body}}} for route in ROUTES},
        "components": {
            "schemas": {
                "Body": {"type": "object", "properties": members},
                "Mode": {"type": "string", "enum": ["fast", "slow", "exact"]},
                "Alias": {"$ref": "#/components/schemas/Mode"},
            }
        },
    }


def optional(**schema: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "boolean"}, Values(True, (False, None, "on", 1), ("maybe", [1]))),
        (
            {"type": "integer", "default": 4, "minimum": 1, "maximum": 9},
            Values(4, (1, 9, None), ("x", [1])),
        ),
        (optional(type="number", minimum=0), Values(1, (0, None), ("x", [1]))),
        ({"type": "string"}, Values("a", ("a", "", None), (7, ["a"]))),
        (
            {"type": "string", "enum": ["fast", "slow"]},
            Values("fast", ("slow", "", None), (7, ["a"])),
        ),
        (
            optional(**{"$ref": "#/components/schemas/Alias"}),
            Values("fast", ("exact", "", None), (7, ["a"])),
        ),
        (optional(type="array", items={}), Values([], (None,), ("x", 7))),
        ({"oneOf": [{"type": "array"}]}, Values([], (None,), ("x", 7))),
        ({}, Values({}, (None,), ("x", [1]))),
    ],
)
def test_a_member_that_is_new_gets_values_by_its_schema(
    schema: dict[str, Any], values: Values
) -> None:
    assert members_of(openapi(unheard_of=schema), CHAT) == {"unheard_of": values}


def test_members_are_those_of_the_document_with_the_values_of_their_route() -> None:
    number = {"type": "integer"}
    document = openapi(logprobs=number, top_k=number)
    of_chat, of_completions = (members_of(document, route) for route in (CHAT, COMPLETIONS))
    assert list(of_chat) == list(of_completions) == ["logprobs", "top_k"]
    assert of_chat["top_k"].ordinary == of_completions["top_k"].ordinary == 5
    assert of_chat["logprobs"].ordinary is True
    assert of_completions["logprobs"].ordinary == 2


# What is asked, and what comes of it.


def answering(*answers: httpx2.Response) -> Way:
    """A server with these answers, one after the other."""
    left = iter(answers)

    async def ask(http: httpx2.AsyncClient, case: Case, body: Any) -> httpx2.Response:
        return next(left)

    return ask


def completion(text: str, **more: Any) -> httpx2.Response:
    return whole({"id": "cmpl-5a1f", "choices": [piece(text)], **more})


BOTH: Final = (completion("a"), completion("b"))
ASKED: Final = Case("n", COMPLETIONS, ({"n": 1}, {"n": 2}))


async def test_answers_that_are_equal_are_counted_and_returned() -> None:
    tally, advanced = Tally(), list[str]()
    theirs = [completion("a"), whole({"error": ERROR}, 400), completion("c")]
    cases = [ASKED, Case("last", COMPLETIONS, (b"{",))]
    ways = {"push": answering(*theirs), "itself": answering(*theirs)}
    told = await compare(
        *(cases, answering(*theirs), ways, [], tally), lambda: advanced.append("a case")
    )
    assert told == [[read(theirs[0]), read(theirs[1])], [read(theirs[2])]]
    assert tally == Tally(compared=tally.compared, answered=2)
    assert tally.compared == {"push": 3, "itself": 3}
    assert advanced == ["a case"] * 2


async def test_an_answer_that_differs_is_noted_with_what_was_asked() -> None:
    tally = Tally()
    theirs = answering(completion("a"), completion("b"))
    ways = {"push": answering(completion("a"), completion("c")), "pull": answering(*BOTH)}
    told = await compare([ASKED], theirs, ways, [], tally)
    assert told == [list(map(read, BOTH))]
    assert tally.compared == {"push": 2, "pull": 2}
    [different] = tally.different
    assert (different.way, different.case, different.body) == ("push", ASKED, {"n": 2})
    assert different.where == [Where(("choices", "0", "text"), "'c', not 'b'")]
    assert different.told() == (
        "push POST /v1/completions: n\n  asked {\"n\": 2}\n  choices.0.text: 'c', not 'b'\n"
    )


@pytest.mark.parametrize(("way", "excused"), [("push", 1), ("pull", 0), ("itself", 0)])
async def test_only_what_a_pair_answers_by_push_is_excused(way: str, excused: int) -> None:
    tally = Tally()
    theirs = answering(*[completion("a", usage={"completion_tokens": 3})] * 2)
    ours = answering(*[completion("a", usage={"completion_tokens": 4})] * 2)
    await compare([ASKED], theirs, {way: ours}, [REFUSED, OF_USAGE], tally)
    assert tally.excused == ({OF_USAGE: 1} if excused else {})
    assert [each.body for each in tally.different] == [{"n": 1}, {"n": 2}][: 2 - excused]


CACHED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    COMPLETIONS: ("usage", {"prompt_tokens_details": {"cached_tokens": 3}}),
    RESPONSES: ("usage", {"input_tokens_details": {"cached_tokens": 3}, "input_tokens": 9}),
    MESSAGES: ("usage", {"cache_read_input_tokens": 3, "input_tokens": 9}),
}


@pytest.mark.parametrize("route", CACHED)
async def test_by_pull_the_cached_tokens_of_a_prompt_do_not_count(route: str) -> None:
    name, cached = CACHED[route]
    others = json.loads(json.dumps(cached).replace("3", "8"))
    if "cache_read_input_tokens" in cached:
        others["input_tokens"] = 4
    case, tally = Case("cached", route, ({},)), Tally()
    theirs = whole({name: {**cached, "output_tokens": 2}})
    ours = whole({name: {**others, "output_tokens": 2}})
    for way in ("pull", "push"):
        await compare([case], answering(theirs), {way: answering(ours)}, [], tally)
    assert [each.way for each in tally.different] == ["push"]
    wrongs = [{**others, "output_tokens": 1}, {**others, "output_tokens": 2, "more": 1}]
    if route == RESPONSES:
        wrongs.append({**others, "output_tokens": 2, "input_tokens": 8})
    for wrong in wrongs:
        tally = Tally()
        ways = {"pull": answering(whole({name: wrong}))}
        await compare([case], answering(theirs), ways, [], tally)
        assert len(tally.different) == 1


async def test_by_pull_refusals_are_not_compared() -> None:
    tally = Tally()
    lost = streamed({"error": ERROR}, DONE)
    theirs = answering(whole({"error": ERROR}, 400), lost)
    await compare([ASKED], theirs, {"pull": answering(*BOTH)}, [], tally)
    assert tally == Tally(answered=1)
    refused = answering(whole({"error": ERROR}, 400), lost)
    await compare([ASKED], answering(*BOTH), {"pull": refused}, [], tally)
    assert len(tally.different) == tally.compared["pull"] == 2


def served(handler: Callable[[httpx2.Request], httpx2.Response]) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.MockTransport(handler))


async def test_a_pull_asks_prefill_for_one_token_and_decode_with_its_reply() -> None:
    asked: list[tuple[str, Any]] = []

    def reply(request: httpx2.Request) -> httpx2.Response:
        asked.append((str(request.url), json.loads(request.content)))
        return whole({"kv_transfer_params": {"remote_host": "prefill"}})

    body = {"prompt": "a", "max_tokens": 6, "min_tokens": 2, "n": 2, "stream": True, "top_k": 5}
    async with served(reply) as http:
        await pulled("http://p", "http://d")(http, Case("a", COMPLETIONS, (body,)), body)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    assert asked == [
        (
            "http://p/v1/completions",
            {"prompt": "a", "max_tokens": 1, "top_k": 5, "kv_transfer_params": params},
        ),
        (
            "http://d/v1/completions",
            {**body, "kv_transfer_params": {"remote_host": "prefill"}},
        ),
    ]


async def test_what_prefill_refuses_is_the_answer_of_a_pull() -> None:
    def reply(request: httpx2.Request) -> httpx2.Response:
        assert request.url.host == "p"
        return whole({"error": ERROR}, 400)

    async with served(reply) as http:
        answer = await pulled("http://p", "http://d")(http, ASKED, {"n": 2})
    assert found(answer, whole({"error": ERROR}, 400)) == []


def test_only_objects_for_a_route_with_a_limit_are_pulled() -> None:
    assert all(can_be_pulled(Case("", route, ({},))) for route in (*ROUTES, RESPONSES, MESSAGES))
    assert not can_be_pulled(Case("", "/tokenize", ({},)))
    assert not can_be_pulled(Case("", CHAT, ({}, b"{")))


async def test_an_answer_that_breaks_off_has_a_status_that_no_server_has() -> None:
    def breaks_off(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.RemoteProtocolError("the server disconnected")

    def lost(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    async with served(breaks_off) as http:
        answer = await straight("http://s")(http, ASKED, {"n": 2})
    assert (answer.status_code, answer.text) == (BROKEN_OFF, "the server disconnected")
    async with served(lost) as http:
        with pytest.raises(httpx2.ConnectError) as raised:
            await straight("http://s")(http, ASKED, {"n": 2})
    assert raised.value.__notes__ == ["http://s at /v1/completions: n: b'{\"n\": 2}'"]


async def test_a_request_goes_out_as_it_is_written() -> None:
    asked: list[httpx2.Request] = []

    def reply(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return whole({})

    case = Case("", CHAT, (b"{",), method="PUT", headers={"Content-Type": "text/plain"})
    async with served(reply) as http:
        await straight("http://s")(http, case, b"{")
    [request] = asked
    assert (request.method, str(request.url)) == ("PUT", "http://s/v1/chat/completions")
    assert request.content == b"{"
    assert request.headers["content-type"] == "text/plain"
