"""The fleet's changes, read from a stream that may be cut off and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from kvxfer.client.answers import unreadable
from kvxfer.errors import ProtocolError
from kvxfer.event_stream import EventParser, ServerSentEvent
from kvxfer.instances import Change, Snapshot
from kvxfer.record import lenient
from kvxfer.unreadable import UNREADABLE

PATH: Final = "/v1/instances/watch"
# A watch sends something at least every 15 s; silence for this long is a dead connection.
SILENCE_SECONDS: Final = 45.0
_RETRY_SECONDS: Final = 1.0


class WatchReader:
    """The position of a watch, over all of its connections, one after the other."""

    def __init__(self, url: str, last_event_id: int | None) -> None:
        self._url = url
        self._last_event_id = last_event_id
        self._parser = EventParser()
        self.connected = False
        """Whether there ever was a connection."""

    def connect(self) -> dict[str, str]:
        """Returns the headers of a new connection."""
        self._parser = EventParser()
        return {} if self._last_event_id is None else {"Last-Event-ID": str(self._last_event_id)}

    def feed(self, chunk: bytes) -> Iterator[Snapshot | Change]:
        self.connected = True
        try:
            events = self._parser.feed(chunk)
        except ProtocolError as error:
            raise unreadable(self._url, error) from error
        for event in events:
            item = self._item(event)
            if item is not None:
                self._last_event_id = item.id
                yield item

    def pause_seconds(self) -> float:
        """Returns the seconds before the next connection; watchers that were cut off together come
        back apart."""
        return _RETRY_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311 (no secret)

    def _item(self, event: ServerSentEvent) -> Snapshot | Change | None:
        kinds: dict[str, type[Snapshot] | type[Change]] = {"snapshot": Snapshot, "change": Change}
        kind = kinds.get(event.event)
        if kind is None:
            return None  # a kind that a later control plane sends
        try:
            return lenient(event.data.encode(), kind)
        except UNREADABLE as error:
            raise unreadable(self._url, error) from error
