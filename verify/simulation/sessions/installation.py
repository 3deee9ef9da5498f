"""Makes the real code use the engines of a simulated fleet."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jwt

import kvxfer.engine.core
import kvxfer.ticket

from . import native
from .fleet import SimulatedFleet


@contextlib.contextmanager
def installed(fleet: SimulatedFleet) -> Iterator[None]:
    """Makes kvxfer.engine and kvxfer.kv use only the simulated native engine in this context."""
    engines = native.module(
        lambda options: native.NativeEngine(
            fleet.network, fleet.oracle, fleet.network.hosts[options.name]
        )
    )
    with (
        mock.patch.object(kvxfer.engine.core, "native", engines),
        mock.patch.object(kvxfer.engine.core, "Memory", native.Memory),
        mock.patch.object(kvxfer.ticket, "jwt", _signatures),
        fleet.defects.installed(),
        _logged(_Log(fleet)),
    ):
        yield


class _Signatures:
    """PyJWT with a cache: without it, decoding tokens would take most of the time."""

    PyJWTError = jwt.PyJWTError

    def __init__(self) -> None:
        self.get_unverified_header = functools.lru_cache(maxsize=64)(jwt.get_unverified_header)
        self._decode = functools.lru_cache(maxsize=64)(self._verify)

    def decode(self, token: str, key: bytes, *, algorithms: list[str], **how: Any) -> Any:
        return self._decode(token, key, algorithms[0], how["issuer"])

    def _verify(self, token: str, key: bytes, algorithm: str, issuer: str) -> Any:
        how: Any = {"verify_exp": False, "verify_iat": False}
        return jwt.decode(token, key, algorithms=[algorithm], issuer=issuer, options=how)


_signatures = _Signatures()


class _Log(logging.Handler):
    """A log in which each warning is a violation: an honest fleet logs none."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(logging.WARNING)
        self._fleet = fleet

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info is not None:
            text += f": {record.exc_info[1]!r}"
        self._fleet.violations.append(text)


@contextlib.contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("kvxfer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
