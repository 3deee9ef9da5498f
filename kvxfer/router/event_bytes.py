"""Server-sent events as bytes that are passed on: cut at their ends, and not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.event_stream import MAX_EVENT_BYTES

_END: Final = b"\n\n"
_OTHER_ENDS: Final = (b"\r\n\r\n", b"\r\r")
DATA: Final = b"data: "


class EventBytes:
    """A stream's bytes, cut into whole events. The rest of an event may never arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> bytes:
        """Returns the events that this part completes. Raises ProtocolError for one that exceeds
        MAX_EVENT_BYTES."""
        if self._rest:
            part = self._rest + part
        if part.endswith(_END):
            self._rest = b""
            return part
        end = max(
            (at + len(mark) for mark in (_END, *_OTHER_ENDS) if (at := part.rfind(mark)) >= 0),
            default=0,
        )
        self._rest = part[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError(f"a server-sent event has more than {MAX_EVENT_BYTES} bytes")
        return part[:end]


def events_in(whole: bytes) -> Iterator[bytes]:
    """Yields the events one by one, each with its end."""
    lines: list[bytes] = []
    for line in whole.splitlines(keepends=True):
        lines.append(line)
        if not line.strip(b"\r\n"):
            yield b"".join(lines)
            lines = []


def data_of(event: bytes) -> bytes | None:
    """Returns the data of an event; None if it has none, as a comment."""
    found = [line for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in found) if found else None


def with_data(event: bytes, value: Any) -> bytes:
    """Returns the event with other data."""
    named = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*named, DATA + msgspec.json.encode(value)]) + _END
