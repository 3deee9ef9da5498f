"""Permission to call a route: each declares scopes, checked before the body is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, cast

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from kvxfer.api import refusals
from kvxfer.api.problems import responses
from kvxfer.api.settings import Settings
from kvxfer.clock import Clock
from kvxfer.errors import BodyTooLarge, Forbidden, RateLimited, Unauthenticated
from kvxfer.record_schema import ignored
from kvxfer.web.rate_limit import RateLimiter, wrong_tokens
from kvxfer.web.request_log import CALLER_KEY
from kvxfer.web.tokens import ANONYMOUS, Caller, Scope

SECURITY_SCHEME: Final = "bearer"
_ADMITTED_KEY: Final = "kvxfer.admitted"

_SCOPES: Final = "__kvxfer_scopes__"
_UNCOUNTED: Final = "__kvxfer_uncounted__"
_PUBLIC: Final[frozenset[Scope]] = frozenset()
_BODY_METHODS: Final = {"POST", "PUT", "PATCH"}

IGNORED_HEADER: Final = "Kvxfer-Ignored"
"""The header that names the members of the body that this version does not know."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMED: Final = 16

F = TypeVar("F", bound=Callable[..., Any])


def allow(*scopes: Scope, counted: bool = True) -> Callable[[F], F]:
    """Declares that a route takes a token with any one of these scopes, and whether its requests
    count against the rate limit."""

    def declare(endpoint: F) -> F:
        setattr(endpoint, _SCOPES, frozenset(scopes))
        setattr(endpoint, _UNCOUNTED, not counted)
        return endpoint

    return declare


def public(endpoint: F) -> F:
    """Declares that a route takes no token."""
    setattr(endpoint, _SCOPES, _PUBLIC)
    return endpoint


def caller(request: Request) -> Caller:
    """Returns the sender of an admitted request."""
    return cast(Caller, request.scope[_ADMITTED_KEY])


def is_operator(request: Request) -> bool:
    """Whether the sender is known to be an operator, and not a worker."""
    known = caller(request)
    return known is not ANONYMOUS and Scope.ADMIN in known.scopes


class Guard:
    """A check of each request's token. One event loop.

    Without tokens every caller may do everything: the server then listens on loopback only, unless
    its operator says otherwise.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._tokens = settings.tokens
        self._requests: RateLimiter | None = None
        if self._tokens is not None and settings.rate_limit:
            burst = max(1, math.ceil(settings.rate_limit))
            self._requests = RateLimiter(settings.rate_limit, burst, clock)
        self._failures = wrong_tokens(clock)

    def admit(self, request: Request, route: GuardedRoute) -> Caller:
        """Returns the caller if it has any of the route's scopes, or if the route has none. For a
        request that was admitted before, it returns the same and counts nothing.

        Raises Unauthenticated, Forbidden or RateLimited.
        """
        if _ADMITTED_KEY not in request.scope:
            request.scope[_ADMITTED_KEY] = self._admitted(request, route)
        return caller(request)

    def _admitted(self, request: Request, route: GuardedRoute) -> Caller:
        if self._tokens is None:
            return ANONYMOUS
        scopes = route.scopes
        address = "unknown" if request.client is None else request.client.host
        if not scopes:
            self._limit(self._requests, ("", address), f"the address {address}")
            return ANONYMOUS
        known = self._authenticate(request, address)
        request.scope[CALLER_KEY] = known.name
        if route.counted:
            self._limit(self._requests, (known.name, address), f"{known.name!r} at {address}")
        if scopes.isdisjoint(known.scopes):
            raise refusals.wrong_scope(request.method, request.url.path, scopes, known)
        return known

    def _authenticate(self, request: Request, address: str) -> Caller:
        assert self._tokens is not None  # noqa: S101 (asked before)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise refusals.no_token()
        caller = self._tokens.current.caller(token.strip())
        if caller is None:
            self._limit(self._failures, address, f"the address {address}, with unknown tokens")
            raise refusals.unknown_token()
        return caller

    def _limit(self, limiter: RateLimiter | None, key: object, who: str) -> None:
        seconds = 0.0 if limiter is None else limiter.wait_seconds(cast(Any, key))
        if seconds:
            raise refusals.too_many_requests(who, seconds)


class GuardedRoute(APIRoute):
    """A route that declares its scopes; it cannot be made without them."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        scopes = getattr(endpoint, _SCOPES, None)
        if scopes is None:
            raise TypeError(
                f"route {path} does not say who may call it: put @allow(Scope.…) or @public on "
                f"{endpoint.__qualname__}"
            )
        self.scopes: frozenset[Scope] = scopes
        self.counted = not getattr(endpoint, _UNCOUNTED, False)
        errors = responses(Unauthenticated, Forbidden, RateLimited) if scopes else {}
        if _BODY_METHODS & set(options.get("methods") or ()):
            errors |= responses(BodyTooLarge)
        options["responses"] = {**errors, **(options.get("responses") or {})}
        if scopes:
            options["openapi_extra"] = {
                **(options.get("openapi_extra") or {}),
                "security": [{SECURITY_SCHEME: [scope]} for scope in sorted(scopes)],
            }
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            guard: Guard = request.app.state.guard
            guard.admit(request, self)
            left_out: set[str] = set()
            ignored.set(left_out)  # every request has its own context
            response = await answer(request)
            if left_out and (names := _names(left_out)):
                response.headers[IGNORED_HEADER] = names
            return response

        return guarded


def route_of(router: APIRouter, endpoint: Callable[..., Any]) -> GuardedRoute:
    """Returns the route of an endpoint, for middleware that answers in its place."""
    routes = (route for route in router.routes if isinstance(route, GuardedRoute))
    return next(route for route in routes if route.endpoint is endpoint)


def _names(members: set[str]) -> str:
    """Joins the names that can stand in a header, at most _MOST_NAMED."""
    return ", ".join(sorted(filter(_NAME.fullmatch, members))[:_MOST_NAMED])
