"""Calls back into the program that uses the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kvxfer.engine")


def tell(callback: Callable[..., object], *arguments: object) -> None:
    """Calls the callback. Its errors are logged, so that no other completion is lost."""
    try:
        callback(*arguments)
    except Exception:
        name = getattr(callback, "__qualname__", repr(callback))
        logger.exception("the engine's handler failed in %s", name)
