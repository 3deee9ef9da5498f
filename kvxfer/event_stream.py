"""Server-sent events as the WHATWG HTML standard defines them, read from chunks of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import ProtocolError

MAX_EVENT_BYTES: Final = 64 << 20
"""A snapshot of the largest fleet takes some tens of MiB."""

# Only these end a line; `str.splitlines` would also cut at characters that JSON may contain.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `id` is the last one seen, as the standard requires."""

    event: str
    data: str
    id: str | None


class EventParser:
    """A parser of chunks as they come. Comments and events without data yield nothing."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._event = ""
        self._data: list[str] = []
        self._nbytes = 0  # bytes in _data
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Returns the events that this chunk completes. Bytes that are not UTF-8 become U+FFFD.

        Raises ProtocolError for an event of more than MAX_EVENT_BYTES.
        """
        ends = self._rest.endswith(b"\r") or _LINE_END.search(chunk) is not None
        self._rest += chunk
        events = self._take_lines() if ends else []
        if len(self._rest) + self._nbytes > MAX_EVENT_BYTES:
            raise ProtocolError(f"a server-sent event has more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take_lines(self) -> list[ServerSentEvent]:
        # A carriage return at the end may be the first half of a line end.
        held = b"\r" if self._rest.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(self._rest.removesuffix(held))
        self._rest = bytearray(rest + held)
        taken = (self._take(line.decode(errors="replace")) for line in lines)
        return [event for event in taken if event is not None]

    def _take(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)
            self._nbytes += len(value) + 1
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event, data = self._event or "message", self._data
        self._event, self._data, self._nbytes = "", [], 0
        return ServerSentEvent(event, "\n".join(data), self._id) if data else None
