"""What the session of each client prints: a line of JSON with what it did and what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

WORDS = (
    *("north", "river", "seven", "glass", "amber", "stone", "quiet", "paper", "field", "light"),
    *("under", "often", "metal", "seed", "cloud", "maybe", "thirty", "open", "green", "last"),
)
CITIES = ("Rome", "Oslo")
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def text(number: int, words: int = 30) -> str:
    """A prompt that no other number has."""
    return f"{number}: " + " ".join(WORDS[number * (n + 7) % len(WORDS)] for n in range(words))


def tell(package: str, did: str, results: dict[str, Any]) -> None:
    print(json.dumps({"version": version(package), "did": did, "results": results}))


def run(session: Callable[[str, str], None]) -> None:
    """Of the API at a URL, and with the model of a folder."""
    url, model = sys.argv[1:]
    session(url, model)
