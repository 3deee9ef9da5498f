"""A stream's text so far, as tokens, so that another worker can go on from there.

A cut is an event after which no token's text is incomplete. The client gets text up to a cut, and
the router keeps back what follows it until the next one. So the client always has the text of a
known number of tokens. A worker that gets these tokens as a prompt, and searches its own output for
stop strings, computes the rest. The tokens after the cut are computed again.

A stop string may begin before a cut and end after it. Text therefore stays back until no stop
string that begins in it can be incomplete: one character less than the longest stop string. vLLM
keeps as many back itself, unless stop strings are part of the answer.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

from kvxfer.router.asked import Asked
from kvxfer.router.bodies import is_on, token_ids, value_of
from kvxfer.router.dialects import CHAT
from kvxfer.router.event_bytes import data_of, events_in, with_data
from kvxfer.unreadable import UNREADABLE
from kvxfer.web.answer import DONE, data_event

JsonObject = dict[str, Any]

# Members that all events of a stream have in common.
_HEAD: Final = ("id", "object", "created", "model")
_CACHED: Final = "prompt_tokens_details"


class _Held(NamedTuple):
    """An event that the client may not have yet."""

    event: bytes
    told: JsonObject
    text: str


class _Cut(NamedTuple):
    """A place in the answer, counted from its begin."""

    events: int = 0
    tokens: int = 0
    characters: int = 0
    certain: bool = True
    """Whether the last token's text is known to be complete. The text of an event of several tokens
    may be that of only the first ones."""


class Transcript:
    """A stream's tokens, and the events that its client does not have yet. Loop only."""

    def __init__(self, asked: Asked) -> None:
        members = asked.members
        self._chat = asked.dialect is CHAT
        self.tells_ids = is_on(value_of(members, "return_token_ids"))
        """Whether the client has asked for token ids."""
        options = value_of(members, "stream_options")
        self._options: JsonObject = options if isinstance(options, dict) else {}
        # Events that count tokens wait, as the tokens after a cut are computed again.
        self._counts = self.tells_ids or is_on(self._options.get("continuous_usage_stats"))
        self._behind = _longest(value_of(members, "stop")) - 1
        in_answer = is_on(value_of(members, "include_stop_str_in_output"))
        self._lag = 0 if in_answer else self._behind  # characters that the worker keeps back
        self._prompt: bytes | None = None if asked.rendered is None else bytes(asked.rendered)
        if asked.ids is not None:
            self._prompt = msgspec.json.encode(asked.ids)
        self.begin()

    def begin(self) -> None:
        """Begins an attempt. The client has nothing of the one before."""
        self.head: JsonObject = {}
        """The members that all events of the client's stream have in common."""
        self.refusal = ""
        """The member of an event that keeps any other worker from going on."""
        self._tokens = array("q")
        self._characters = 0
        self._cuts: deque[_Cut] = deque()  # after the last one that the client has
        self._cut = _Cut()
        self._held: deque[_Held] = deque()
        self._events = 0  # before those held
        self._text = ""  # the client does not have it
        self._finished = self._told_usage = False

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's tokens; None if the worker has not sent them."""
        return None if self._prompt is None else token_ids(msgspec.json.decode(self._prompt))

    @property
    def tokens(self) -> list[int]:
        """The tokens of the text that the client has."""
        return self._tokens[: self._cut.tokens].tolist()

    @property
    def certain(self) -> bool:
        """Whether the text of the last token is known to be complete."""
        return self._cut.certain

    @property
    def begun(self) -> bool:
        """Whether the client has an event."""
        return self._events > 0

    def take(self, whole: bytes) -> bytes:
        """Takes the worker's events, and returns what the client gets now, also of earlier ones."""
        return b"".join(map(self._take, events_in(whole)))

    def ending(self, of_prefill: JsonObject | None) -> bytes | None:
        """Returns the end of a stream that broke off after its last token; None if it broke off
        before."""
        if not self._finished:
            return None
        if self._told_usage or not is_on(self._options.get("include_usage")):
            return DONE
        if (prompt := self.prompt) is None:
            return None
        usage = usage_of(len(prompt), len(self._tokens))
        if cached := ((of_prefill or {}).get("usage") or {}).get(_CACHED):
            usage[_CACHED] = cached
        return data_event({**self.head, "choices": [], "usage": usage}) + DONE

    # --- one event -------------------------------------------------------------------------------

    def _take(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event  # a comment
        try:
            told = msgspec.json.decode(data, type=JsonObject)
        except UNREADABLE:  # [DONE]
            return self._release(len(self._held)) + event
        self.head = self.head or {name: told[name] for name in _HEAD if name in told}
        choice = choice_of(told)
        said = (choice.get("delta") or {}).get("content") if self._chat else choice.get("text")
        ids = token_ids(choice.get("token_ids")) or []
        self.refusal = self.refusal or self._refused(choice, ids, said)
        self._hide(told, choice)
        if self._is_only_ids(choice):
            return b""
        text = said if isinstance(said, str) else ""
        self._tokens.extend(ids)
        self._characters += len(text)
        self._text += text
        self._held.append(_Held(event, told, text))
        if text:
            self._cuts.append(self._here(certain=len(ids) == 1))
        self._finished = self._finished or choice.get("finish_reason") is not None
        self._told_usage = self._told_usage or (not choice and told.get("usage") is not None)
        if self._finished or self.refusal:
            self._cut = self._here()
            return self._release(len(self._held))
        return self._release_cuts()

    def _refused(self, choice: JsonObject, ids: list[int], said: Any) -> str:
        """Returns the member that shows that the tokens contain more than the text, or that there
        are no tokens; empty if there is none."""
        if self._chat:
            delta = choice.get("delta") or {}
            for name in delta:
                if delta[name] and name not in ("role", "content"):
                    return str(name)
            if ids and said is None:
                return "reasoning"
        silent = bool(said) and not ids and choice.get("finish_reason") is None
        return "return_token_ids" if silent else ""

    def _hide(self, told: JsonObject, choice: JsonObject) -> None:
        """Removes the token ids that the client has not asked for, and keeps the prompt's here."""
        for holder in (told, choice):
            if holder.get("prompt_token_ids") is not None:
                self._prompt = msgspec.json.encode(holder["prompt_token_ids"])
            for name in ("prompt_token_ids", "token_ids"):
                if name in holder and not self.tells_ids:
                    holder[name] = None

    def _is_only_ids(self, choice: JsonObject) -> bool:
        """Whether vLLM sends the event only because token ids were asked for: a parser keeps back
        the token's text."""
        empty = self._chat and choice.get("delta") == {} and choice.get("finish_reason") is None
        return empty and not self.tells_ids

    # --- what may leave --------------------------------------------------------------------------

    def _here(self, *, certain: bool = True) -> _Cut:
        """Makes a cut after the newest event, whose text ends `_lag` characters into the next."""
        events = self._events + len(self._held)
        return _Cut(events, len(self._tokens), self._characters + self._lag, certain)

    def _release_cuts(self) -> bytes:
        """Releases events up to the last cut that lies far enough back, and events without text
        after it."""
        released = b""
        last = self._characters + self._lag - self._behind
        while self._cuts and self._cuts[0].characters <= last:
            self._cut = self._cuts.popleft()
            text = len(self._text) - (self._characters - self._cut.characters)
            released += self._release(self._cut.events - self._events, text)
        # Events before the first token wait for it: until then, any worker can begin again.
        while self._held and self._tokens and not (self._held[0].text or self._counts):
            released += self._release(1, 0)
        return released

    def _release(self, events: int, characters: int | None = None) -> bytes:
        """Returns the next events with this much of the text, or with all of it: the last event
        that has text gets it."""
        text = self._text[:characters]
        self._text = self._text[len(text) :]
        self._events += events
        released: list[bytes] = []
        for event, told, own in reversed([self._held.popleft() for _ in range(events)]):
            if own:
                self._say(told, text)
                text = ""
            released.append(with_data(event, told))
        return b"".join(reversed(released))

    def _say(self, told: JsonObject, text: str) -> None:
        choice = choice_of(told)
        if self._chat:
            choice["delta"]["content"] = text
        else:
            choice["text"] = text


def choice_of(told: JsonObject) -> JsonObject:
    """Returns the choice of an event; empty if it has none."""
    choices = told.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def usage_of(prompt: int, completion: int) -> JsonObject:
    """Returns numbers of tokens in vLLM's form."""
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _longest(stop: Any) -> int:
    """Counts the characters of the longest stop string; 1 if there is none."""
    strings = stop if isinstance(stop, list) else [stop]
    return max((len(each) for each in strings if isinstance(each, str) and each), default=1)
