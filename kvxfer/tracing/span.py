"""The current span, and spans below it; there are none if the request is not traced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

REQUEST_ID: Final = "kvxfer.request_id"
"""The attribute by which `kvxfer trace` finds a request."""
HEADER: Final = "traceparent"

# W3C Trace Context, version 00.
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")


class Span(Protocol):
    """A piece of work of a traced request. Any thread. Times are nanoseconds since the epoch."""

    @property
    def traceparent(self) -> str:
        """The header that makes another process's span a child of this one."""

    def child(
        self, name: str, start_ns: int | None = None, /, **attributes: str | int | float
    ) -> Span: ...

    def set(self, **attributes: str | int | float) -> None: ...

    def rename(self, name: str) -> None: ...

    def event(self, name: str) -> None:
        """Records an event that happens now."""

    def end(self, error: BaseException | None = None, *, end_ns: int | None = None) -> None:
        """Ends the span; later calls are ignored."""


current: ContextVar[Span | None] = ContextVar("kvxfer span", default=None)
"""The span of the current request; tasks that are created meanwhile inherit it."""

incoming: ContextVar[str] = ContextVar("kvxfer traceparent", default="")
"""The header that the caller of this server sent, if its trace is recorded."""


def is_recorded(traceparent: str) -> bool:
    """Whether this is a valid header of a trace that is recorded."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found is not None and int(found[1], 16) & 1 == 1


def child(name: str, **attributes: str | int | float) -> Span | None:
    """Begins a span below the current one; the caller ends it."""
    parent = current.get()
    return None if parent is None else parent.child(name, **attributes)


@contextmanager
def span(name: str, **attributes: str | int | float) -> Iterator[Span | None]:
    """Yields a span below the current one. It ends with the block, and fails if the block does."""
    begun = child(name, **attributes)
    if begun is None:
        yield None
        return
    try:
        yield begun
    except BaseException as error:
        begun.end(error)
        raise
    begun.end()
