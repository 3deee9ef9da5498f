"""The native module, with its errors turned into kvxfer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvxfer.errors import EngineError, KvxferError, NotBuilt, by_code

try:
    from kvxfer import _native as native
except ImportError as missing:
    raise NotBuilt(
        "the native engine kvxfer._native is not compiled or does not load here "
        f"({missing}); install kvxfer with: pip install . (needs a C++20 compiler and the "
        "OpenSSL headers)"
    ) from missing

__all__ = ["error_of", "native", "translated"]


def error_of(code: str, message: str) -> KvxferError:
    """The public error of a native code and text."""
    error_class = by_code(code)
    return (EngineError if error_class is KvxferError else error_class)(message)


@contextmanager
def translated() -> Iterator[None]:
    """Runs native calls; native errors leave as the public classes."""
    try:
        yield
    except native.Error as error:
        code, message = error.args
        raise error_of(code, message) from None
