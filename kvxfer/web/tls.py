"""TLS at the server: a certificate and a key, which may be replaced, and the CA of the clients."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from kvxfer.errors import InvalidArgument

_log = logging.getLogger("kvxfer.api")


class ServerTls:
    """The TLS context of a server. One thread. Raises InvalidArgument, which names the file that
    cannot be used.

    With `client_ca` only clients with a certificate of that CA pass the handshake.
    """

    def __init__(self, cert: Path, key: Path | None = None, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key or cert, client_ca
        self._seen = self._identify()
        self.context = self._make()

    def refresh(self) -> None:
        """Takes a new certificate and key for later connections. If they cannot be used, keeps the
        old ones and logs it once."""
        found = self._identify()
        if found == self._seen:
            return
        self._seen = found
        try:
            self._make()  # to try them: a context that failed half-way would serve no client
            self.context.load_cert_chain(self._cert, self._key)
        except (InvalidArgument, OSError) as error:
            _log.error("the earlier TLS certificate stays in force: %s", error)
        else:
            _log.info("TLS certificate read again from %s", self._cert)

    def _make(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._cert, self._key)
        except OSError as error:  # SSLError is one
            raise InvalidArgument(
                f"the TLS certificate {self._cert} with the key {self._key} cannot be used: {error}"
            ) from error
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:
                raise InvalidArgument(
                    f"the client CA {self._client_ca} cannot be used: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _identify(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_identity, (self._cert, self._key)))


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
