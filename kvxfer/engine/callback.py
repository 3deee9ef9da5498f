"""Calling back into the program that uses the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kvxfer.engine")


def tell(callback: Callable[..., object], *arguments: object) -> None:
    """Calls; what it raises is logged, for it must not cost anybody else his completion."""
    try:
        callback(*arguments)
    except Exception:
        name = getattr(callback, "__qualname__", repr(callback))
        logger.exception("the engine's handler failed in %s", name)
