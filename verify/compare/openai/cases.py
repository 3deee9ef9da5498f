"""Requests to compare: generated from the members of the bodies, and written by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from verify.compare.openai.members import CHAT, COMPLETIONS, Values

Body = dict[str, Any]
MODELS: Final = ("tiny", "blue", "red")
"""The name that all servers give their model, and the names of its adapters."""
PROMPT: Final[Mapping[str, str]] = {COMPLETIONS: "prompt", CHAT: "messages"}
# It has a seed and temperature 0, so that an answer is the same each time.
_BASE: Final[Body] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "seed": 7}
_WORDS: Final = (
    *("north", "river", "seven", "glass", "amber", "stone", "quiet", "paper", "field", "light"),
    *("under", "often", "metal", "seed", "cloud", "maybe", "thirty", "open", "green", "last"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent one after the other and compared one by one."""

    name: str
    route: str
    bodies: tuple[Any, ...]
    """The bodies: objects, or bytes that are not an object."""
    covers: frozenset[tuple[str, str]] = frozenset()
    """The members, and the classes of their values."""
    pairs: frozenset[tuple[str, str]] = frozenset()
    """The pairs of members that have ordinary values together."""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


class Texts:
    """A source of prompts that no other request has: a cached prefix would show in the answer."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._number = itertools.count()

    def text(self, words: int = 40) -> str:
        said = " ".join(self._rng.choices(_WORDS, k=words))
        return f"{next(self._number)}-{self._rng.getrandbits(24):06x} {said}"

    def prompt(self, route: str, words: int = 40) -> Any:
        text = self.text(words)
        return text if route == COMPLETIONS else [{"role": "user", "content": text}]


def base(route: str, texts: Texts) -> Body:
    return {**_BASE, PROMPT[route]: texts.prompt(route)}


def singles(route: str, members: Mapping[str, Values], texts: Texts) -> Iterator[Case]:
    """Yields each member with a value of each class, the valid ones streamed and in one piece."""
    for name, values in members.items():
        for kind in ("absent", "ordinary", "edge", "wrong"):
            for value in (None,) if kind == "absent" else values.of(kind):
                for streamed in _both(name, kind):
                    body = {**base(route, texts), **streamed, **values.needs}
                    body[name] = value
                    if kind == "absent" or (name == PROMPT[route] and kind == "ordinary"):
                        del body[name]
                    if name == PROMPT[route] and kind == "ordinary":
                        body[name] = texts.prompt(route)
                    told = "" if kind == "absent" else f"={value!r:.40}"
                    yield Case(
                        f"{name}{told}{' streamed' if streamed else ''}",
                        route,
                        (body,),
                        frozenset({(name, kind)}),
                    )


def _both(name: str, kind: str) -> Sequence[Body]:
    if name in {"stream", "stream_options"} or kind == "wrong":
        return ({},)
    return ({}, {"stream": True})


def together(route: str, members: Mapping[str, Values], names: Iterable[str], texts: Texts) -> Case:
    """Returns a case that has these members with ordinary values in one body."""
    chosen = sorted(names)
    body = base(route, texts)
    for name in chosen:
        body |= members[name].needs
    for name in chosen:
        body[name] = texts.prompt(route) if name == PROMPT[route] else members[name].ordinary
    if body.get("use_beam_search"):
        body["temperature"] = 0  # else its logprobs have each step's sampled token
    pairs = frozenset(itertools.combinations(chosen, 2))
    return Case("+".join(chosen), route, (body,), pairs=pairs)
