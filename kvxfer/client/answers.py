"""The outcome of a request: its value, or the error to raise and whether to try again."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Generic, TypeVar, cast

import httpx2
import msgspec

from kvxfer.client.calls import Call
from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    KvxferError,
    LayoutMismatch,
    RateLimited,
    UntrustedCertificate,
    by_code,
)
from kvxfer.unreadable import UNREADABLE

STALE_HEADER: Final = "Kvxfer-Stale-Seconds"
_PROBLEM_MEMBERS: Final = frozenset(
    {"type", "title", "status", "detail", "code", "instance", "request_id"}
)
# Errors that only the control plane's log explains.
_DEFECTS: Final = frozenset({"internal-error"})
# Seconds; no call waits longer anyway.
_LONGEST_RETRY: Final = 86400.0
# The request has not left this process.
_UNSENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """An answer of the control plane, and its age."""

    value: T
    stale_seconds: float | None
    """The age of the value if the registry is unavailable; None if the value is current."""
    etag: str | None = None
    following: str | None = None
    """The path of the next page, if there is one."""


class Failed(Exception):
    """One attempt failed with `error`. `again`: another one may succeed, after `seconds`."""

    def __init__(self, error: KvxferError, *, again: bool, seconds: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.again, self.seconds = error, again, seconds


def whole(pages: Sequence[Answer[T]]) -> Answer[T]:
    """Joins the pages of an answer; it is as stale as the stalest of them."""
    if len(pages) == 1:
        return pages[0]
    value: Any = tuple(item for page in pages for item in cast(Iterable[Any], page.value))
    stale = [page.stale_seconds for page in pages if page.stale_seconds is not None]
    return Answer(value, max(stale, default=None))


def read(response: httpx2.Response, call: Call[T], url: str) -> Answer[T]:
    """Reads an answer. Raises Failed."""
    links = response.headers.get("etag"), response.links.get("next", {}).get("url")
    if response.status_code == HTTPStatus.NOT_MODIFIED and call.known is not None:
        return Answer(call.known[1], _stale_seconds(response), *links)
    if not response.is_success:
        error = problem(response, url)
        unavailable = isinstance(error, ControlPlaneUnavailable | RateLimited)
        refused = response.status_code in (429, 503)
        again = unavailable and (refused or call.repeatable)
        raise Failed(error, again=again, seconds=_retry_after(response, error))
    try:
        return Answer(call.read(response.content), _stale_seconds(response), *links)
    except UNREADABLE as error:
        raise Failed(unreadable(url, error), again=False) from error


def unanswered(
    error: httpx2.RequestError, call: Call[Any], url: str, *, hurried: bool = False
) -> Failed:
    """Returns the failure of an attempt without an answer. `hurried`: as in
    ControlPlaneUnavailable."""
    named = unavailable(error, url)
    if isinstance(named, ControlPlaneUnavailable):
        named.hurried = hurried
    distrusted = isinstance(named, UntrustedCertificate)
    again = not distrusted and (isinstance(error, _UNSENT) or call.repeatable)
    return Failed(named, again=again)


def unavailable(error: httpx2.RequestError, url: str) -> ControlPlaneError:
    cause = str(error) or type(error).__name__
    if isinstance(_root(error), ssl.SSLError):
        return UntrustedCertificate(
            f"{url} and this client do not trust each other ({cause}); name the CA of the control "
            "plane in KVXFER_CA_FILE and, where it asks for one, a client certificate in "
            "KVXFER_CERT_FILE and KVXFER_KEY_FILE"
        )
    if url.startswith("https") and isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        # In TLS 1.3 a server learns of a wrong client certificate after the client's handshake.
        return ControlPlaneUnavailable(
            f"{url} closed the connection ({cause}); if it asks for client certificates, name one "
            "that it knows in KVXFER_CERT_FILE and KVXFER_KEY_FILE"
        )
    return ControlPlaneUnavailable(
        f"no control plane answers at {url} ({cause}); start one with `kvxfer serve`, or name it "
        "with KVXFER_CONTROL_PLANE"
    )


def unreadable(url: str, error: Exception) -> ControlPlaneError:
    return ControlPlaneError(
        f"{url} answered something that cannot be read ({error}); is it a kvxfer control plane of "
        "this version?"
    )


def problem(response: httpx2.Response, url: str) -> KvxferError:
    """Returns the error that an answer stands for."""
    error = _problem(response, url)
    if isinstance(error, ControlPlaneError):
        error.request_id = response.headers.get("x-request-id")
    return error


def _problem(response: httpx2.Response, url: str) -> KvxferError:
    """Returns the error that a problem document names."""
    try:
        document = msgspec.json.decode(response.content, type=dict[str, Any])
        code, detail = str(document["code"]), str(document["detail"])
    except (*UNREADABLE, KeyError):
        away = response.status_code in (502, 503, 504)
        kind = ControlPlaneUnavailable if away else ControlPlaneError
        return kind(
            f"{url} answered HTTP {response.status_code} without a problem document; "
            "is it a kvxfer control plane?"
        )
    details = {name: document[name] for name in document.keys() - _PROBLEM_MEMBERS}
    kind_of_error = by_code(code)
    if kind_of_error is LayoutMismatch:
        return LayoutMismatch(
            str(details.get("field")), details.get("prefill"), details.get("decode")
        )
    if issubclass(kind_of_error, ControlPlaneError):
        return kind_of_error(detail, **details)
    if kind_of_error is KvxferError:
        where = f", request {response.headers.get('x-request-id')}" if code in _DEFECTS else ""
        return ControlPlaneError(f"{url} refused: {detail} [{code}{where}]", **details)
    return kind_of_error(detail)


def _stale_seconds(response: httpx2.Response) -> float | None:
    header = response.headers.get(STALE_HEADER, "")
    try:
        return float(header) if header else None
    except ValueError:
        return None


def _retry_after(response: httpx2.Response, error: KvxferError) -> float:
    """Returns seconds: with a fraction if the problem says so, otherwise those of Retry-After."""
    if isinstance(error, RateLimited):
        exact = error.details.get("retry_after_seconds")
        if isinstance(exact, int | float) and 0 <= exact < _LONGEST_RETRY:
            return float(exact)
    header = response.headers.get("retry-after", "")
    return min(float(header), _LONGEST_RETRY) if header.isdecimal() else 0.0


def _root(error: BaseException) -> BaseException:
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error
