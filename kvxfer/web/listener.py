"""Listening sockets for HTTP servers."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from kvxfer.addresses import host_and_port
from kvxfer.errors import AddressInUse, InvalidArgument, PermissionDenied
from kvxfer.settings import Seconds, check_bounds

BACKLOG: Final = 2048
# Servers keep an idle connection longer than clients (httpx2: 5 s) and load balancers (60 s) do: a
# request that meets a connection being closed fails.
KEEP_ALIVE_SECONDS: Final = 75

_EVERY: Final = "::"
_EVERY_IPV4: Final = "0.0.0.0"  # noqa: S104


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """A server's limits for the connections of clients. Raises InvalidArgument."""

    header_seconds: Seconds = 10.0
    """The longest time for a client to send the headers of a request."""
    body_seconds: Seconds = 30.0
    """The longest time for a client to send the body of a request, after its headers."""
    max_connections: Annotated[int, Meta(ge=1)] = 16384
    """The most open connections; the next one gets a 503 and is closed. At most half of the files
    that the process may open."""

    def __post_init__(self) -> None:
        check_bounds(self)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address; port 0 is any free one. `::` is every address of this
    machine, IPv4 and IPv6 as far as it has them.

    Raises AddressInUse, PermissionDenied, or InvalidArgument if the host is no address of this
    machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            if host != _EVERY or error.errno != errno.EAFNOSUPPORT:
                raise
            return bind(_EVERY_IPV4, port)
    except OSError as error:
        raise InvalidArgument(
            f"host {host!r} is no address of this machine ({error.strerror}); "
            "use one of its addresses, such as 127.0.0.1"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == _EVERY:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port, *_ = listener.getsockname()
    return f"{'https' if tls else 'http'}://{host_and_port(host, port)}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this host reaches the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _bind_error(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"port {port} on {host} is taken; stop what listens there, or choose another port "
            "(0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return PermissionDenied(
            f"port {port} on {host} needs a privilege; choose a port from 1024 on"
        )
    return InvalidArgument(
        f"host {host!r} is no address of this machine ({error.strerror}); "
        "use one of its addresses, such as 127.0.0.1"
    )
