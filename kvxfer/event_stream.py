"""Server-sent events as the WHATWG HTML standard defines them, read from chunks of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Only these end a line; `str.splitlines` would also cut at characters that JSON may contain.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `id` is the last one seen, as the standard has it."""

    event: str
    data: str
    id: str | None


class EventParser:
    """Feed it chunks as they come; comments and events without data give nothing."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that this chunk completes."""
        text = self._rest + chunk
        # A carriage return at the end may be the first half of a line end.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text.removesuffix(held))
        self._rest = rest + held
        return [event for line in lines if (event := self._take(line.decode())) is not None]

    def _take(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event, data = self._event or "message", self._data
        self._event, self._data = "", []
        return ServerSentEvent(event, "\n".join(data), self._id) if data else None
