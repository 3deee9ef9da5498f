"""Hosts and ports as text: joins them, and checks that other hosts can reach an address."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvxfer.errors import InvalidArgument

HTTP_FORM: Final = "http://HOST:PORT"
ENGINE_FORM: Final = "kvx://HOST:PORT/ENGINE_ID"
BOOTSTRAP_FORM: Final = "HOST:PORT"

# A server that listens on one of these listens on all addresses of its host.
EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104
_LABELS: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")
_DIGITS: Final = re.compile(r"[0-9.]+")
_CREDENTIALS: Final = re.compile(r"(?<=//)[^/]*@")


def host_and_port(host: str, port: int) -> str:
    """Returns `HOST:PORT` as in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_address(what: str, text: str, form: str) -> None:
    """Raises InvalidArgument unless `text` has the form `form`, one of those above, and names a
    host that others can reach. `what` names it in the message. The port of a URL may be left out.
    """
    scheme, has_scheme, rest = form.rpartition("://")
    try:
        parts = urlsplit(text if has_scheme else f"//{text}")
        fault = _fault(parts, scheme, bare="/" not in rest)
    except ValueError as error:
        fault = f"{error}"
    shown = _CREDENTIALS.sub("…@", text)
    if fault is not None:
        raise InvalidArgument(f"{what} is {shown!r}, but {fault}; write it as {form}")
    if parts.hostname in EVERY_ADDRESS:
        raise InvalidArgument(
            f"{what} is {shown!r}, which is where a server listens, not an address at which others "
            "reach it; give one of its host's addresses (a worker has it from its option `host`)"
        )


def _fault(parts: SplitResult, scheme: str, *, bare: bool) -> str | None:
    """Returns the fault of an address, or None; `bare` if nothing may follow the port. Raises
    ValueError if the port is not a number of 16 bits."""
    if scheme and parts.scheme not in (scheme, f"{scheme}s"):
        return f"it does not begin with {scheme}://"
    if "@" in parts.netloc:
        return "an address has no user and no password"
    host, bracketed = parts.hostname or "", "[" in parts.netloc
    if not bracketed and parts.netloc.count(":") > 1:
        return "an IPv6 address stands in brackets, as in [fd00::1]:8100"
    if not host:
        return "it names no host"
    if bracketed or _DIGITS.fullmatch(host):
        # A zone, as in fe80::1%eth0, is known to one host alone.
        if "%" in host or not _is_numeric(host):
            return f"{host} is not an IP address that other hosts can reach"
    elif not _LABELS.fullmatch(host):
        return f"{host} is not a host name"
    if parts.port == 0 or parts.netloc.endswith(":"):
        return "it has no port"
    if bare and (parts.path or parts.query or parts.fragment):
        return "nothing comes after the port"
    return None


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
