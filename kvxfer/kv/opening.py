"""Sessions that are being opened: to be awaited, or entered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class _Session(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


P = ParamSpec("P")
SessionT = TypeVar("SessionT", bound=_Session)


class OpeningSession(Coroutine[Any, Any, SessionT], Generic[SessionT]):
    """The result of KvEndpoint's `decode_session()` and `prefill_session()`. Nothing has begun yet:

        async with endpoint.decode_session(...) as session:  # begins and, at the end, leaves it
        session = await endpoint.decode_session(...)         # begins it; leave it yourself

    It is a coroutine, so `asyncio.create_task()` accepts it too.
    """

    __slots__ = ("_begin", "_session")

    def __init__(self, begin: Coroutine[Any, Any, SessionT]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, Any, SessionT]:
        return self._begin.__await__()

    async def __aenter__(self) -> SessionT:
        self._session = await self._begin
        return await self._session.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.__aexit__(kind, error, traceback)

    def send(self, value: Any) -> Any:
        return self._begin.send(value)

    def throw(self, *error: Any) -> Any:
        return self._begin.throw(*error)

    def close(self) -> None:
        self._begin.close()


def opens(
    begin: Callable[P, Coroutine[Any, Any, SessionT]],
) -> Callable[P, OpeningSession[SessionT]]:
    """Returns the method with the same parameters, whose session may be entered without `await`."""

    @functools.wraps(begin)
    def opening(*args: P.args, **kwargs: P.kwargs) -> OpeningSession[SessionT]:
        return OpeningSession(begin(*args, **kwargs))

    return opening
