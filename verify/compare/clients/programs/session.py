"""The common parts of the clients' sessions. Each prints one line of JSON: what it did, and the
results."""

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
    """Returns a prompt that no other number has."""
    return f"{number}: " + " ".join(WORDS[number * (n + 7) % len(WORDS)] for n in range(words))


def tell(package: str, did: str, results: dict[str, Any]) -> None:
    print(json.dumps({"version": version(package), "did": did, "results": results}))


def run(session: Callable[[str, str], None]) -> None:
    """Runs a session. The process's arguments are the API's URL and the model's folder."""
    url, model = sys.argv[1:]
    session(url, model)
