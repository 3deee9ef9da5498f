"""The addresses of the control plane, and the credentials and trusted CAs of a client."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import httpx2

from kvxfer.errors import InvalidArgument
from kvxfer.watched_file import WatchedFile

ENVIRONMENT: Final = "KVXFER_CONTROL_PLANE"
DEFAULT_URL: Final = "http://127.0.0.1:8080"


class Addresses:
    """The URLs of a control plane's replicas: those that are given, separated by commas, else those
    of the environment, else the usual one on this host.

    A client asks one until it does not answer, then the next. Raises InvalidArgument.
    """

    def __init__(self, urls: str | None) -> None:
        given = urls or os.environ.get(ENVIRONMENT) or DEFAULT_URL
        self.all = tuple(url.strip().rstrip("/") for url in given.split(","))
        for url in self.all:
            try:
                named = url.startswith(("http://", "https://")) and bool(httpx2.URL(url).host)
            except httpx2.InvalidURL as error:
                raise InvalidArgument(_not_a_url(url, f" ({error})")) from error
            if not named:
                raise InvalidArgument(_not_a_url(url))
        # Clients that start together do not all ask the first.
        self._asked = random.randrange(len(self.all))  # noqa: S311 (no secret)

    @property
    def current(self) -> str:
        return self.all[self._asked]

    def turn_from(self, url: str) -> None:
        """Moves on to the next URL after `url` did not answer."""
        if url == self.current:
            self._asked = (self._asked + 1) % len(self.all)


def _not_a_url(url: str, why: str = "") -> str:
    return (
        f"the control plane's URL is {url!r}{why}; write it as http://HOST:PORT, several with "
        "commas between them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A bearer token, and files for TLS; each may be None.

    The token file is read again when it changes, so that a token is replaced without a restart.
    """

    token: str | None = field(default=None, repr=False)
    """The token; None takes the one in `token_file`."""
    token_file: Path | None = None
    ca_file: Path | None = None
    """The CA of the control plane's certificate; None trusts the CAs of the system."""
    cert_file: Path | None = None
    """The client certificate, for a control plane that asks for one."""
    key_file: Path | None = None
    """The key of the client certificate; None if `cert_file` has it too."""

    @classmethod
    def from_environment(cls) -> Self:
        """Reads KVXFER_TOKEN or KVXFER_TOKEN_FILE, and KVXFER_CA_FILE, _CERT_FILE and _KEY_FILE."""

        def file(name: str) -> Path | None:
            value = os.environ.get(f"KVXFER_{name}_FILE")
            return Path(value) if value else None

        return cls(
            token=os.environ.get("KVXFER_TOKEN") or None,
            token_file=file("TOKEN"),
            ca_file=file("CA"),
            cert_file=file("CERT"),
            key_file=file("KEY"),
        )

    def auth(self) -> httpx2.Auth | None:
        """Returns the authorization for requests of httpx2; None without a token. Raises
        InvalidArgument if the token file cannot be read."""
        return self._auth()

    def _auth(self) -> _Bearer | None:
        if self.token is not None:
            token = _checked(self.token, "the token")
            return _Bearer(lambda: token, refresh=lambda: False)
        if self.token_file is None:
            return None
        file = WatchedFile("token file", self.token_file, _parse_token)
        return _Bearer(lambda: file.current, file.refresh)

    def bearer(self) -> Callable[[], str] | None:
        """Returns a function that returns the current token, for clients of another library; None
        without a token.

        Raises InvalidArgument if the token file cannot be read.
        """
        auth = self._auth()
        return None if auth is None else auth.token

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS context. Raises InvalidArgument that names the file that does not fit."""
        if self.key_file is not None and self.cert_file is None:
            raise InvalidArgument(
                f"there is a client key, {self.key_file}, but no certificate; set KVXFER_CERT_FILE"
            )
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(f"the CA file {self.ca_file} cannot be used: {error}") from error
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except (OSError, ssl.SSLError) as error:
                raise InvalidArgument(
                    f"the client certificate {self.cert_file} with the key "
                    f"{self.key_file or self.cert_file} cannot be used: {error}"
                ) from error
        return context


class _Bearer(httpx2.Auth):
    """A bearer token. After a 401 it is read again, and a changed token is sent once more."""

    def __init__(self, token: Callable[[], str], refresh: Callable[[], bool]) -> None:
        self.token, self._refresh = token, refresh

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.token()}"
        response = yield request
        if response.status_code == httpx2.codes.UNAUTHORIZED and self._refresh():
            request.headers["Authorization"] = f"Bearer {self.token()}"
            yield request


def _parse_token(content: bytes) -> str:
    return _checked(content.decode(errors="replace").strip(), "the content of the token file")


def _checked(token: str, what: str) -> str:
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise InvalidArgument(f"{what} is not a bearer token: that is one word in ASCII")
    return token
