"""The answers of an inference engine, in a form that can be compared.

Only the form of ids, times and fingerprints counts. The adjacent deltas of a choice in a stream are
joined, as vLLM merges them by timing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httpx2

from kvxfer.event_stream import EventParser

LOGPROB_TOLERANCE: Final = 1e-3

# vLLM's value for minus infinity.
_FORBIDDEN: Final = -9999.0

# Members whose values differ between servers, and the form of the values.
_BY_FORM: Final[Mapping[str, re.Pattern[str]]] = {
    "id": re.compile(
        r"(cmpl|chatcmpl|resp|msg|rs|fc|call|toolu|modelperm|chatcmpl-tool|embd|score)?"
        r"[-_]?[A-Za-z0-9._:/+=@-]+"
    ),
    "call_id": re.compile(r"[A-Za-z_-]+[0-9a-f]+"),
    "item_id": re.compile(r"[a-z]+_[0-9a-f]+"),
    "system_fingerprint": re.compile(r"vllm-[0-9.]+-[0-9a-f]+"),
    "signature": re.compile(r"[0-9a-f]+"),
}
# The count of reasoning tokens depends on the pieces in which a stream arrives.
_NUMBERS_BY_FORM: Final = frozenset(
    {"created", "created_at", "sequence_number", "reasoning_tokens"}
)
_HEADERS: Final = ("content-type", "retry-after", "www-authenticate")
# Members with text that arrives in pieces.
_JOINED: Final = frozenset(
    {"text", "content", "reasoning", "reasoning_content", "refusal", "arguments", "name"}
)
_LATE: Final = "then a chunk"
# Events of /v1/responses and /v1/messages that are pieces of one value, and the members with text.
_PIECES: Final = re.compile(r".*(\.delta|_block_delta)$")
_TEXT_OF_PIECES: Final = frozenset({"delta", "text", "thinking", "partial_json"})


class Where(NamedTuple):
    """A place at which two answers differ."""

    path: tuple[str, ...]
    told: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.told}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer that have to be equal in two answers."""

    status: int
    headers: Mapping[str, str]
    content: Any

    def differences(self, other: Answer) -> list[Where]:
        """Returns the places at which the other answer differs."""
        found = list(_differences(self.status, other.status, ("status",)))
        for name in _HEADERS:
            found += _differences(self.headers.get(name), other.headers.get(name), (name,))
        return [*found, *_differences(self.content, other.content, ())]


def read(answer: httpx2.Response) -> Answer:
    """Reads an answer in one piece, or a whole stream."""
    headers = {name: answer.headers[name] for name in _HEADERS if name in answer.headers}
    if headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(answer.status_code, headers, _stream(answer.content))
    try:
        content = json.loads(answer.content)
    except ValueError:
        content = answer.text
    if isinstance(content, dict) and content.get("object") == "list" and "data" in content:
        return Answer(answer.status_code, headers, _listed(content))
    return Answer(answer.status_code, headers, by_form(content))


def by_form(value: Any, name: str = "") -> Any:
    """Returns a copy in which each value that counts only by its form is replaced by the form."""
    if isinstance(value, dict):
        return {key: by_form(each, key) for key, each in _permitted(value, name).items()}
    if isinstance(value, list):
        return [by_form(each, name) for each in value]
    if name in _NUMBERS_BY_FORM and isinstance(value, int | float):
        return "a number"
    if isinstance(value, str) and (form := _BY_FORM.get(name)) is not None:
        prefix = re.match(r"([A-Za-z]+[-_])*", value)
        return f"{prefix[0] if prefix else ''}…" if form.fullmatch(value) else value
    return value


def _listed(content: Mapping[str, Any]) -> Any:
    """Returns a list in comparable form. The ids of models are names, which count."""
    names = [each.get("id") for each in content["data"] if each.get("object") == "model"]
    return {**by_form(content), "names": names}


def _permitted(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Removes the names of tokens that a grammar forbids. They are equal for vLLM, so any of them
    may fill the list of the likeliest tokens."""
    if name != "top_logprobs":
        return value
    if isinstance(value.get("logprob"), int | float):  # an entry of a chat
        return value if value["logprob"] > _FORBIDDEN else {"logprob": value["logprob"]}
    kept = {token: logprob for token, logprob in value.items() if logprob > _FORBIDDEN}
    return {**kept, "forbidden": len(value) - len(kept)}


def _stream(content: bytes) -> Any:
    events = EventParser().feed(content)
    told = [(event.event, _json(event.data)) for event in events]
    ended = content.endswith((b"\n\n", b"\r\n\r\n"))
    if any(name != "message" for name, _ in told):
        return {"events": list(_typed(told)), "ended": ended}
    return {**_chunks([data for _, data in told]), "ended": ended}


def _json(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


def _chunks(events: list[Any]) -> dict[str, Any]:
    """Returns a stream of completions or chats: each choice as the sum of its deltas, and all other
    values. `members` has the names of all members of all chunks."""
    choices: dict[str, dict[str, Any]] = {}
    whole: dict[str, list[Any]] = {}
    usage: Any = None
    others: list[Any] = []
    members: set[str] = set()
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("choices"), list):
            others.append(by_form(event))
            continue
        if others and others[-1] != _LATE:
            others.append(_LATE)
        members |= _names(event)
        usage = event.get("usage", usage)  # the last one counts: it grows
        for name, value in by_form(event).items():
            if name not in {"choices", "usage"} and value not in (
                told := whole.setdefault(name, [])
            ):
                told.append(value)
        for piece in event["choices"]:
            choice = choices.setdefault(str(piece.get("index")), {})
            if choice.get("finish_reason") is not None:
                choice.setdefault("after its end", []).append(piece)
            _add(choice, by_form(piece))
    # A value that is sent once is null in other chunks; their number varies.
    values = {name: [each for each in told if each is not None] for name, told in whole.items()}
    return {
        **values,
        "usage": by_form(usage),
        "choices": [choices[index] for index in sorted(choices)],
        "others": others,
        "members": sorted(members),
    }


def _names(event: Mapping[str, Any]) -> set[str]:
    """Returns the names of an event's members, of its choices' members and of their deltas'."""
    found = set(event)
    for choice in event["choices"]:
        found |= {f"choice.{name}" for name in choice}
        found |= {f"delta.{name}" for name in choice.get("delta") or ()}
    return found


def _add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        had = whole.get(name)
        if name == "tool_calls" and isinstance(value, list):
            calls = whole[name] = had or []
            for call in value:
                same = [each for each in calls if each.get("index") == call.get("index")]
                if not same:
                    calls.append({})
                _add(same[0] if same else calls[-1], call)
        elif isinstance(value, dict):
            if not isinstance(had, dict):
                had = whole[name] = {}
            _add(had, value)
        elif _goes_on(had, value, name in _JOINED):
            whole[name] = had + value
        elif value is not None or name not in whole:
            whole[name] = value


def _typed(events: list[tuple[str, Any]]) -> Iterator[Any]:
    """Yields events with a type. Adjacent pieces of one value are joined."""
    piece: tuple[str, Any] | None = None
    for name, data in events:
        data = by_form(data)
        same = piece is not None and piece[0] == name and _PIECES.fullmatch(name)
        if piece is not None and same and _continues(piece[1], data):
            _join(piece[1], data)
            continue
        if piece is not None:
            yield list(piece)
        piece = (name, data)
    if piece is not None:
        yield list(piece)


def _continues(whole: Any, piece: Any) -> bool:
    """Returns whether a piece differs from the one before only in its text."""
    if not isinstance(whole, dict) or not isinstance(piece, dict) or whole.keys() != piece.keys():
        return False
    return all(
        value == whole[name]
        or _goes_on(whole[name], value, name in _TEXT_OF_PIECES)
        or _continues(whole[name], value)
        for name, value in piece.items()
    )


def _join(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        had = whole.get(name)
        if isinstance(had, dict) and isinstance(value, dict):
            _join(had, value)
        elif _goes_on(had, value, name in _TEXT_OF_PIECES):
            whole[name] = had + value


def _goes_on(had: Any, value: Any, is_text: bool) -> bool:
    """Returns whether a value continues the one before."""
    both = (type(had), type(value))
    return both == (list, list) or (is_text and both == (str, str))


def _differences(ours: Any, theirs: Any, path: tuple[str, ...]) -> Iterator[Where]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                there = "missing" if name not in ours else "extra"
                yield Where((*path, name), there)
            else:
                yield from _differences(ours[name], theirs[name], (*path, name))
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            yield Where(path, f"{len(ours)} entries, not {len(theirs)}")
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(one, other, (*path, str(index)))
    elif not _same(ours, theirs):
        yield Where(path, f"{ours!r}, not {theirs!r}")


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
    return type(ours) is type(theirs) and bool(ours == theirs)
