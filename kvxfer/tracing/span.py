"""The span that is under way, and spans below it; nothing where the request is not traced."""

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
        """What makes another process's span a child of this one."""

    def child(
        self, name: str, start_ns: int | None = None, /, **attributes: str | int | float
    ) -> Span: ...

    def set(self, **attributes: str | int | float) -> None: ...

    def rename(self, name: str) -> None: ...

    def event(self, name: str) -> None:
        """Something that happened now."""

    def end(self, error: BaseException | None = None, *, end_ns: int | None = None) -> None:
        """Once; what comes later is ignored."""


current: ContextVar[Span | None] = ContextVar("kvxfer span", default=None)
"""Of the request that is being worked on; tasks that are created meanwhile inherit it."""

incoming: ContextVar[str] = ContextVar("kvxfer traceparent", default="")
"""What the caller of this server sent, where its trace is recorded."""


def is_recorded(traceparent: str) -> bool:
    """Whether it is one, of a trace that is recorded."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found is not None and int(found[1], 16) & 1 == 1


def child(name: str, **attributes: str | int | float) -> Span | None:
    """A span below the current one, to be ended by the caller."""
    parent = current.get()
    return None if parent is None else parent.child(name, **attributes)


@contextmanager
def span(name: str, **attributes: str | int | float) -> Iterator[Span | None]:
    """A span below the current one while the block runs, which fails with it."""
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
