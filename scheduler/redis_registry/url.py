"""The URL that names a Redis server, or the Sentinels that know where it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvxfer.addresses import host_and_port
from kvxfer.errors import InvalidArgument

_PLAIN: Final = ("redis", "rediss", "unix")
_SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT: Final = 26379
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
# As redis-py has them in a plain URL; here they go for Sentinels and servers.
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_FORMS: Final = (
    "redis://HOST:PORT/DB, rediss://… with TLS, unix:///PATH, or "
    "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Where Redis is. `name` says so to people, without user and password."""

    name: str
    url: str = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises InvalidArgument where it is no such URL; it never shows the password."""
        try:
            parts = urlsplit(url)
            if parts.scheme in _SENTINEL:
                return _with_sentinels(parts)
            if parts.scheme in _PLAIN:
                return _plain(parts, url)
        except ValueError as error:
            raise InvalidArgument(
                f"the registry's URL cannot be read ({error}); write it as {_FORMS}"
            ) from error
        raise InvalidArgument(
            f"the registry's URL begins with {parts.scheme!r}; write it as {_FORMS}"
        )

    def client(self, *, timeout: float) -> Redis:
        """A new client, which gives up each connect and each read after `timeout`."""
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # The caller decides whether to ask again.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "client_name": "kvxfer",
            **self.options,
        }
        if not self.sentinels:
            return Redis.from_url(self.url, **options)
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            self.sentinels,
            sentinel_kwargs={
                "socket_timeout": timeout / 2,
                "socket_connect_timeout": timeout / 2,
                "retry": Retry(NoBackoff(), 0),
                **self.sentinel_options,
            },
        )
        master: Redis = sentinel.master_for(self.service, **options)
        return master


def _plain(parts: SplitResult, url: str) -> RedisUrl:
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("it names no socket")
        return RedisUrl(parts.path, url)
    if not parts.hostname:
        raise ValueError("it names no host")
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        raise ValueError(f"the database is {database!r}, not a number")
    return RedisUrl(host_and_port(parts.hostname, parts.port or 6379), url)


def _with_sentinels(parts: SplitResult) -> RedisUrl:
    credentials, _, hosts = parts.netloc.rpartition("@")
    sentinels = tuple(_address(host) for host in hosts.split(","))
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service after the Sentinels")
    if database and not database.isdecimal():
        raise ValueError(f"the database is {database!r}, not a number")
    asked = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    tls: dict[str, Any] = {}
    if parts.scheme == "rediss+sentinel":
        tls = {name: asked.pop(name) for name in _TLS_OPTIONS if name in asked} | {"ssl": True}
    unknown = asked.keys() - set(_SENTINEL_OPTIONS)
    if unknown:
        raise ValueError(f"it has an unknown option, {min(unknown)!r}")
    username, _, password = credentials.partition(":")
    options = {
        "db": int(database or 0),
        "username": unquote(username) or None,
        "password": unquote(password) or None,
        **tls,
    }
    return RedisUrl(
        name=f"service {service} of the Sentinels {hosts}",
        url="",
        sentinels=sentinels,
        service=service,
        sentinel_options={
            **{name.removeprefix("sentinel_"): value for name, value in asked.items()},
            **tls,
        },
        options=options,
    )


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"{host!r} names no Sentinel")
    return parts.hostname, parts.port or _SENTINEL_PORT
