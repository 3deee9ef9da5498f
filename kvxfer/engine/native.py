"""The native module, with its errors turned into kvxfer's."""

from __future__ import annotations

from types import TracebackType
from typing import Final

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
    """Returns the public error of a native code and text."""
    error_class = by_code(code)
    return (EngineError if error_class is KvxferError else error_class)(message)


class _Translated:
    """A context that translates native errors. It has no state, so one instance serves all uses,
    also around every step of a MoE group."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, native.Error):
            code, message = error.args
            raise error_of(code, message) from None


_TRANSLATED: Final = _Translated()


def translated() -> _Translated:
    """Returns a context for native calls, which raises native errors as the public classes."""
    return _TRANSLATED
