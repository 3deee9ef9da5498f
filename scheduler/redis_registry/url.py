"""The URL of a Redis server, of Sentinels that know where it is, or of a cluster."""

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
from kvxfer.scheduler.redis_registry.cluster import slot_client

_PLAIN: Final = ("redis", "rediss", "unix")
_SENTINEL: Final = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT: Final = 26379
_CLUSTER: Final = ("redis+cluster", "rediss+cluster")
_PORT: Final = 6379
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
# Options of redis-py's plain URLs; here they go to Sentinels and servers.
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_FORMS: Final = (
    "redis://HOST:PORT/DB, rediss://… with TLS, unix:///PATH, "
    "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, or redis+cluster://HOST:PORT,HOST:PORT"
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The place of Redis. `name` describes it to people, without user and password."""

    name: str
    url: str = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    """Some nodes of a Redis Cluster."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Parses a URL. Raises InvalidArgument, which never shows the password."""
        try:
            parts = urlsplit(url)
            if parts.scheme in _SENTINEL:
                return _with_sentinels(parts)
            if parts.scheme in _CLUSTER:
                return _of_cluster(parts)
            if parts.scheme in _PLAIN:
                return _plain(parts, url)
        except ValueError as error:
            raise InvalidArgument(
                f"the registry's URL cannot be read ({error}); write it as {_FORMS}"
            ) from error
        raise InvalidArgument(
            f"the registry's URL begins with {parts.scheme!r}; write it as {_FORMS}"
        )

    def client(self, *, timeout: float, prefix: str) -> Redis:
        """Returns a new client for keys that begin with `prefix`. Each connect and each read gives
        up after `timeout` seconds. Raises InvalidArgument if a cluster may spread such keys over
        nodes."""
        once = Retry(NoBackoff(), 0)  # the caller decides whether to ask again
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": once,
            "protocol": 2,
            "client_name": "kvxfer",
            **self.options,
        }
        if not self.sentinels and not self.nodes:
            return Redis.from_url(self.url, **options)
        finding = {
            "socket_timeout": timeout / 2,
            "socket_connect_timeout": timeout / 2,
            "retry": once,
        }
        if self.nodes:
            if not prefix.startswith("{"):
                raise InvalidArgument(
                    f"registry_prefix is {prefix!r}, and in a Redis Cluster the keys would be on "
                    f"several nodes; write it in braces, as '{{{prefix}}}'"
                )
            return slot_client(self.nodes, prefix, finding={**finding, **self.options}, **options)
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            self.sentinels, sentinel_kwargs={**finding, **self.sentinel_options}
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
    return RedisUrl(host_and_port(parts.hostname, parts.port or _PORT), url)


def _of_cluster(parts: SplitResult) -> RedisUrl:
    hosts, login = _hosts(parts)
    if parts.path.strip("/"):
        raise ValueError(f"it ends with {parts.path!r}, and a cluster has no databases")
    tls, unknown = _tls(parts)
    if unknown:
        raise ValueError(f"it has an unknown option, {min(unknown)!r}")
    return RedisUrl(
        name=f"the cluster of {hosts}",
        url="",
        nodes=tuple(_address(host, _PORT, "node") for host in hosts.split(",")),
        options={**login, **tls},
    )


def _with_sentinels(parts: SplitResult) -> RedisUrl:
    hosts, login = _hosts(parts)
    sentinels = tuple(_address(host, _SENTINEL_PORT, "Sentinel") for host in hosts.split(","))
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service after the Sentinels")
    if database and not database.isdecimal():
        raise ValueError(f"the database is {database!r}, not a number")
    tls, asked = _tls(parts)
    if unknown := asked.keys() - set(_SENTINEL_OPTIONS):
        raise ValueError(f"it has an unknown option, {min(unknown)!r}")
    return RedisUrl(
        name=f"service {service} of the Sentinels {hosts}",
        url="",
        sentinels=sentinels,
        service=service,
        sentinel_options={
            **{name.removeprefix("sentinel_"): value for name, value in asked.items()},
            **tls,
        },
        options={"db": int(database or 0), **login, **tls},
    )


def _hosts(parts: SplitResult) -> tuple[str, dict[str, Any]]:
    """Returns the hosts, and the options to log in."""
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    return hosts, {"username": unquote(username) or None, "password": unquote(password) or None}


def _tls(parts: SplitResult) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the options for TLS, and the others."""
    asked = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    if not parts.scheme.startswith("rediss"):
        return {}, asked
    return {name: asked.pop(name) for name in _TLS_OPTIONS if name in asked} | {"ssl": True}, asked


def _address(host: str, port: int, what: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"{host!r} names no {what}")
    return parts.hostname, parts.port or port
