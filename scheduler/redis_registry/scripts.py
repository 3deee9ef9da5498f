"""The steps that Redis takes as a whole: Lua scripts, from the folder lua/."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias

Step: TypeAlias = Literal[
    "abandon",
    "block_table",
    "blocks",
    "change_role",
    "deregister",
    "drain",
    "heartbeat",
    "register",
    "release",
    "reserve",
    "sweep",
    "undrain",
    "weight_update",
]

_FOLDER: Final = files("kvxfer.scheduler.redis_registry") / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


@cache
def script(step: Step) -> Script:
    text = "\n".join(
        (_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in ("prelude", step)
    )
    # The name that Redis gives to a script, not a matter of trust.
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
